//! Minimisation of failing cases.

use wirepath_flow::Rule;

/// Returns a minimal subset of the items that still fails, in order. No single item can be left out.
pub fn smallest_subset<T: Clone>(items: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut kept = items.to_vec();
    loop {
        let before = kept.len();
        let mut part = before;
        while part > 0 {
            let mut at = 0;
            while at < kept.len() {
                let end = (at + part).min(kept.len());
                let without = [&kept[..at], &kept[end..]].concat();
                if fails(&without) { kept = without } else { at = end }
            }
            part /= 2;
        }
        if kept.len() == before {
            return kept;
        }
    }
}

/// Returns simplified rules that still fail. No pattern item and no action can be left out.
pub fn simplest(rules: &[Rule], mut fails: impl FnMut(&[Rule]) -> bool) -> Vec<Rule> {
    let mut kept = rules.to_vec();
    let mut at = 0;
    while at < kept.len() {
        let simpler = simpler(&kept[at]).into_iter().find_map(|rule| {
            let mut changed = kept.clone();
            changed[at] = rule;
            fails(&changed).then_some(changed)
        });
        match simpler {
            Some(changed) => kept = changed,
            None => at += 1,
        }
    }
    kept
}

/// Returns the variants of a rule without one of its items or actions.
fn simpler(rule: &Rule) -> Vec<Rule> {
    fn without<T: Clone>(all: &[T]) -> impl Iterator<Item = Vec<T>> {
        (0..all.len()).map(|at| [&all[..at], &all[at + 1..]].concat())
    }
    let (pattern, actions) = (rule.pattern(), rule.actions());
    let fewer_items = without(pattern).map(|pattern| (pattern, actions.to_vec()));
    let fewer_actions = without(actions).map(|actions| (pattern.to_vec(), actions));
    let made = |(pattern, actions)| Rule::new(rule.direction(), rule.priority(), pattern, actions).ok();
    fewer_items.chain(fewer_actions).filter_map(made).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn irrelevant_elements_are_removed() {
        let all: Vec<u32> = (0..1000).collect();
        let mut asked = 0;
        let fails = |some: &[u32]| {
            asked += 1;
            [17, 500, 999].iter().all(|one| some.contains(one))
        };
        assert_eq!(smallest_subset(&all, fails), [17, 500, 999]);
        assert!(asked < 200, "asked {asked} times");
        assert!(smallest_subset(&all, |_| true).is_empty());
        assert_eq!(smallest_subset(&all, |some| some.len() == 1000), all);
    }

    #[test]
    fn rules_are_minimised() {
        let rules: Vec<Rule> = ["ingress prio 7: eth / ipv4 dst 10.0.0.0/8 / udp dst 53 => count, mark 7, drop"]
            .map(|text| text.parse().unwrap())
            .into();
        let simple = simplest(&rules, |rules| rules[0].to_string().contains("mark 7"));
        assert!(
            simple[0].to_string().ends_with("=> mark 7") && !simple[0].to_string().contains("udp"),
            "{}",
            simple[0]
        );
    }
}
