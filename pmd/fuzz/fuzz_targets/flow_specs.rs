//! Bytes as a flow of libibverbs. Encoding returns the same bytes, and the rule of the flow translates back
//! to the same flow.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_flow::Action;
use wirepath_pmd::drivers::nic::verbs::flow_specs::{decode, encode, from_verbs, kernel_command, to_verbs};

fuzz_target!(|bytes: &[u8]| {
    let Ok((attr, specs)) = decode(bytes) else { return };
    assert_eq!(decode(&encode(&attr, &specs)), Ok((attr, specs.clone())));
    assert!(kernel_command(&attr, &specs, 1).len() >= 24);
    let Ok(rule) = from_verbs(&attr, &specs, Some(Action::Queue(0)), |_| Some(Action::DecTtl)) else { return };
    assert_eq!(rule.to_string().parse().as_ref(), Ok(&rule));
    // If the rule can be translated, the flow gives the same rule again.
    let Ok(again) = to_verbs(&rule, attr.port) else { return };
    let object = |_| Some(Action::DecTtl);
    let back = from_verbs(&again.attr, &again.specs, again.destination.clone(), object).expect("it was a rule");
    assert_eq!((back.fields(), back.actions(), back.priority()), (rule.fields(), rule.actions(), rule.priority()));
});
