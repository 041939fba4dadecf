//! Any bytes as a flow of libibverbs: it is written back as it was read, and the rule that it makes says the same flow again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::flow::Action;
use wirepath_pmd::flow::verbs::{decode, encode, from_verbs, kernel_command, to_verbs};

fuzz_target!(|bytes: &[u8]| {
    let Ok((attr, specs)) = decode(bytes) else { return };
    assert_eq!(decode(&encode(&attr, &specs)), Ok((attr, specs.clone())));
    assert!(kernel_command(&attr, &specs, 1).len() >= 24);
    let Ok(rule) = from_verbs(&attr, &specs, Some(Action::Queue(0)), |_| Some(Action::DecTtl)) else { return };
    assert_eq!(rule.to_string().parse().as_ref(), Ok(&rule));
    // What a NIC was told is told it again, if all of it has words.
    let Ok(again) = to_verbs(&rule, attr.port) else { return };
    let object = |_| Some(Action::DecTtl);
    let back = from_verbs(&again.attr, &again.specs, again.destination.clone(), object).expect("it was a rule");
    assert_eq!((back.fields(), back.actions(), back.priority()), (rule.fields(), rule.actions(), rule.priority()));
});
