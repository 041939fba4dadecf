//! Any bytes as the TOML and the JSON form of rules: rules that survive their text, or an error that says where.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::flow::{Ports, Rule, from_settings};
use wirepath_pmd::settings::Source;

const PORTS: Ports<'_> = Ports(&[("lan", 0), ("wan", 7)]);

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
            let (line, column) = error.position.expect("there is a text, so there is a place");
            assert!(line >= 1 && line <= text.matches('\n').count() + 1 && column >= 1, "{line}:{column} of {text:?}");
        }
    }
});
