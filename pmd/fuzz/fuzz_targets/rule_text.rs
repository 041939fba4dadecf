//! Rules in the text format: canonical text and JSON give the same rule, or the error marks a word of the
//! text.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_flow::{Ports, Rule, covers, overlaps};
use wirepath_packet::PortId;
use wirepath_pmd::drivers::nic::verbs::flow_specs::{decode, encode, to_verbs};

fuzz_target!(|text: &str| {
    match Rule::parse(text, Ports(&[("lan", PortId::new(0)), ("wan", PortId::new(7))])) {
        Ok(rule) => {
            let printed = rule.to_string();
            assert_eq!(printed.parse::<Rule>().as_ref(), Ok(&rule), "{printed}");
            assert_eq!(Rule::from_json(&rule.to_json(), Ports::default()).as_ref(), Ok(&rule), "{printed}");
            let fields = rule.fields();
            assert!(covers(&fields, &fields) && overlaps(&fields, &fields), "{printed}");
            if let Ok(translation) = to_verbs(&rule, 1) {
                let bytes = encode(&translation.attr, &translation.specs);
                assert_eq!(decode(&bytes), Ok((translation.attr, translation.specs)), "{printed}");
            }
        }
        Err(error) => {
            assert!(text.get(error.span.clone()).is_some(), "{error:?}");
            assert!(error.column >= 1 && error.column <= text.chars().count() + 1, "{error:?}");
            assert!(!error.message.is_empty(), "{error:?}");
        }
    }
});
