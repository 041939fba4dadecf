//! Rule files in every format: the canonical text of a rule gives the same rule, and errors are positions in
//! the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_flow::rule_file::{FileFormat, read};
use wirepath_flow::{Ports, Rule};
use wirepath_packet::PortId;
use wirepath_settings::Source;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let source = Source::new("fuzz", text);
    let lines = text.split('\n').count();
    let _ = FileFormat::of(&source);
    for form in [FileFormat::Text, FileFormat::Toml, FileFormat::Json] {
        let listed = match read(&source, form, Ports(&[("lan", PortId::new(1))])) {
            Ok(listed) => listed,
            Err(error) => {
                assert!(error.position.is_none_or(|(line, column)| line <= lines + 1 && column > 0), "{error}");
                continue;
            }
        };
        for it in listed {
            match it.rule {
                Ok(rule) => assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule)),
                Err(error) => assert!(error.position.is_some_and(|(line, _)| line <= lines), "{error}"),
            }
        }
    }
});
