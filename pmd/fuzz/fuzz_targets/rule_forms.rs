//! Rules in the TOML and JSON formats: the canonical text gives the same rule, or the error has a position.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_flow::{Ports, Rule, from_settings};
use wirepath_packet::PortId;
use wirepath_settings::Source;

const PORTS: Ports<'_> = Ports(&[("lan", PortId::new(0)), ("wan", PortId::new(7))]);

fn check(rule: &Rule) {
    assert_eq!(rule.to_string().parse::<Rule>().as_ref(), Ok(rule));
}

fuzz_target!(|text: &str| {
    if let Ok(value) = serde_json::from_str(text) {
        match Rule::from_json(&value, PORTS) {
            Ok(rule) => {
                check(&rule);
                assert_eq!(Rule::from_json(&rule.to_json(), Ports::default()), Ok(rule));
            }
            Err(error) => assert!(!error.message.is_empty() && !error.to_string().is_empty()),
        }
    }
    let source = Source::new("fuzz.toml", text);
    let Ok(document) = source.parse() else { return };
    match from_settings(&document.settings(), PORTS) {
        Ok(rules) => rules.iter().for_each(check),
        Err(error) => {
            let (line, column) = error.position.expect("the text is known, so the error has a position");
            assert!(line >= 1 && line <= text.matches('\n').count() + 1 && column >= 1, "{line}:{column} of {text:?}");
        }
    }
});
