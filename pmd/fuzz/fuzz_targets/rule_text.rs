//! Any text as a rule: it is one that survives its own words and its JSON, or it is refused at a word that is there.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::flow::{Ports, Rule, covers, overlaps, verbs};

fuzz_target!(|text: &str| {
    match Rule::parse(text, Ports(&[("lan", 0), ("wan", 7)])) {
        Ok(rule) => {
            let printed = rule.to_string();
            assert_eq!(printed.parse::<Rule>().as_ref(), Ok(&rule), "{printed}");
            assert_eq!(Rule::from_json(&rule.to_json(), Ports::default()).as_ref(), Ok(&rule), "{printed}");
            let fields = rule.fields();
            assert!(covers(&fields, &fields) && overlaps(&fields, &fields), "{printed}");
            if let Ok(translation) = verbs::to_verbs(&rule, 1) {
                let bytes = verbs::encode(&translation.attr, &translation.specs);
                assert_eq!(verbs::decode(&bytes), Ok((translation.attr, translation.specs)), "{printed}");
            }
        }
        Err(error) => {
            assert!(text.get(error.span.clone()).is_some(), "{error:?}");
            assert!(error.column >= 1 && error.column <= text.chars().count() + 1, "{error:?}");
            assert!(!error.message.is_empty() && error.underlined(text).contains('^'), "{error:?}");
        }
    }
});
