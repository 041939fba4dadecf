//! The rule language as drivers and engines read it (the parser of `wirepath_wire`, closed lists of fields, the values of keys in a
//! packet) against the reference, which shares none of that.

use wirepath_pmd::flow::{FieldSet, Outside, Rule, value};
use wirepath_rulelab::headers::{Headers, TunnelPorts};
use wirepath_rulelab::{Noted, Reference, Rng, make, show};
use wirepath_wire::Parser;

/// The first rule of these that fits, in their order; `Err` if the frame is refused.
fn first(rules: &[(u64, FieldSet)], frame: &[u8], noted: &Noted) -> Result<Option<u64>, String> {
    let parsed = Parser::default().parse(frame).map_err(|error| error.to_string())?;
    let outside = Outside { port: noted.port, mark: noted.mark, data: noted.data };
    let fits = |(_, fields): &&(u64, FieldSet)| fields.matches(|key| value(&parsed, frame, outside, key));
    Ok(rules.iter().find(fits).map(|(id, _)| *id))
}

#[test]
fn fields_and_parser_mean_what_the_reference_means() {
    let seeds: Vec<u64> = match std::env::var("RULELAB_SEED") {
        Ok(seed) => vec![seed.parse().expect("RULELAB_SEED is a number")],
        Err(_) => (0..std::env::var("RULELAB_SEEDS").map_or(400, |n| n.parse().unwrap())).collect(),
    };
    let most = std::env::var("RULELAB_SHOW").ok().and_then(|n| n.parse().ok()).unwrap_or(5);
    let (mut wrong, mut hits, mut refused) = (Vec::new(), 0, 0);
    for seed in seeds {
        let mut rng = Rng::new(seed);
        let count = rng.pick(&[4, 12, 40, 100]);
        let rules = make::rules(&mut rng, count);
        let mut reference = Reference::default();
        let mut lists = Vec::new();
        for rule in &rules {
            let id = reference.add(rule.clone());
            lists.push((rule.direction(), rule.priority(), id, rule.fields()));
        }
        lists.sort_by_key(|(_, priority, id, _)| (*priority, *id));
        for _ in 0..400 {
            let aim = rng.index(rules.len());
            let direction = rules[aim].direction();
            let (frame, noted) = make::packet(&mut rng, Some(&rules[aim]));
            let these: Vec<(u64, FieldSet)> =
                lists.iter().filter(|(d, ..)| *d == direction).map(|(_, _, id, list)| (*id, list.clone())).collect();
            let expected = match Headers::of(&frame, &TunnelPorts::default()).stacks[0].broken {
                Some(what) => Err(what),
                None => Ok(reference.classify(direction, &frame, &noted)),
            };
            let got = first(&these, &frame, &noted);
            match (&expected, &got) {
                (Ok(a), Ok(b)) if a == b => hits += u64::from(a.is_some()),
                (Err(_), Err(_)) => refused += 1,
                _ if wrong.len() >= most => {}
                _ => {
                    let rule = |id: &Option<u64>| id.and_then(|id| reference.rule(id)).map(Rule::to_string);
                    wrong.push(format!(
                        "RULELAB_SEED={seed}: expected {expected:?}, got {got:?}\n        {:?}\n        {:?}\n{}",
                        expected.as_ref().map(rule),
                        got.as_ref().map(rule),
                        show::packet(&frame, &noted)
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(hits > 100 && refused > 0, "{hits} {refused}");
}
