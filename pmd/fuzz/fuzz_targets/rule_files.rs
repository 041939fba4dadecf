//! Any text as a file of rules, in every form: rules come back from their canonical text, errors lie in the file.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::flow::list::{Form, read};
use wirepath_pmd::flow::{Ports, Rule};
use wirepath_pmd::settings::Source;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let source = Source::new("fuzz", text);
    let lines = text.split('\n').count();
    let _ = Form::of(&source);
    for form in [Form::Text, Form::Toml, Form::Json] {
        let listed = match read(&source, form, Ports(&[("lan", 1)])) {
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
