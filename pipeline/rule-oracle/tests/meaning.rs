//! The rule language as drivers and engines evaluate it, compared with the reference, which shares no code
//! with it. The evaluation uses the parser of `wirepath_wire`, field lists, and the values of keys in a
//! packet.

use wirepath_flow::{FieldSet, Metadata, Rule, packet_value};
use wirepath_rule_oracle::headers::{Headers, TunnelPorts};
use wirepath_rule_oracle::{PacketMetadata, Reference, Rng, generate, show};
use wirepath_wire::Parser;

/// Returns the first of these rules that matches. The error is that of the parser.
fn first(rules: &[(u64, FieldSet)], frame: &[u8], metadata: &PacketMetadata) -> Result<Option<u64>, String> {
    let parsed = Parser::default().parse(frame).map_err(|error| error.to_string())?;
    let input = Metadata { port: metadata.port, mark: metadata.mark, data: metadata.data };
    let fits = |(_, fields): &&(u64, FieldSet)| fields.matches(|key| packet_value(&parsed, frame, input, key));
    Ok(rules.iter().find(fits).map(|(id, _)| *id))
}

#[test]
fn fields_and_parser_agree_with_the_reference() {
    let seeds: Vec<u64> = match std::env::var("ORACLE_SEED") {
        Ok(seed) => vec![seed.parse().expect("ORACLE_SEED is a number")],
        Err(_) => (0..std::env::var("ORACLE_SEEDS").map_or(400, |n| n.parse().unwrap())).collect(),
    };
    let max_shown = std::env::var("ORACLE_SHOW").ok().and_then(|n| n.parse().ok()).unwrap_or(5);
    let (mut wrong, mut hits, mut refused) = (Vec::new(), 0, 0);
    for seed in seeds {
        let mut rng = Rng::new(seed);
        let count = rng.pick(&[4, 12, 40, 100]);
        let rules = generate::rules(&mut rng, count);
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
            let (frame, metadata) = generate::packet(&mut rng, Some(&rules[aim]));
            let these: Vec<(u64, FieldSet)> =
                lists.iter().filter(|(d, ..)| *d == direction).map(|(_, _, id, list)| (*id, list.clone())).collect();
            let expected = match Headers::of(&frame, &TunnelPorts::default()).stacks[0].malformed {
                Some(what) => Err(what),
                None => Ok(reference.classify(direction, &frame, &metadata)),
            };
            let got = first(&these, &frame, &metadata);
            match (&expected, &got) {
                (Ok(a), Ok(b)) if a == b => hits += u64::from(a.is_some()),
                (Err(_), Err(_)) => refused += 1,
                _ if wrong.len() >= max_shown => {}
                _ => {
                    let rule = |id: &Option<u64>| id.and_then(|id| reference.rule(id)).map(Rule::to_string);
                    wrong.push(format!(
                        "ORACLE_SEED={seed}: expected {expected:?}, got {got:?}\n        {:?}\n        {:?}\n{}",
                        expected.as_ref().map(rule),
                        got.as_ref().map(rule),
                        show::packet(&frame, &metadata)
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(hits > 100 && refused > 0, "{hits} {refused}");
}
