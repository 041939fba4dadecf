//! Selects the flow rules that the XDP program decides, and gives the reason for the others.

use std::collections::HashMap;

use super::classify::{LINK, MaskedCompare, NETWORK, ProgramRule, TRANSPORT, fact};
use crate::port::{KernelRule, PortId};
use wirepath_flow::{
    Action, Direction, Field, FieldSet, HeaderType, ItemKind, Key, KeyKind, MaskedValue, Rule, mpls, overlaps,
};

/// Maximum number of rules in the program. The kernel's verifier processes at most a million instructions.
const MAX_RULES: usize = 256;

/// Result of compiling a list of rules.
#[derive(Debug, Default)]
pub(super) struct CompiledRules {
    /// Rules of the program, in order.
    pub(super) entries: Vec<ProgramRule>,
    /// Indices of the rules that pass packets to the kernel, by counter number.
    pub(super) counted: Vec<usize>,
    /// Result for each rule with the action `kernel`.
    pub(super) rules: Vec<KernelRule>,
}

/// Compiles rules in the order in which they are matched. Egress rules and rules of other ports are skipped.
pub(super) fn compile(rules: &[Rule], port: PortId) -> CompiledRules {
    let mut list: Vec<CandidateRule> = Vec::new();
    let mut decided = CompiledRules::default();
    for (number, rule) in rules.iter().enumerate() {
        let set = rule.fields();
        let elsewhere = set.get(Key::field(0, Field::PortId)).is_some_and(|bits| !bits.matches(port.number().into()));
        if rule.direction() == Direction::Egress || elsewhere {
            continue;
        }
        let considered = CandidateRule { number, compares: compile_pattern(&set), set, needed: false, kernel: None };
        let taken = to_kernel(rule).then(|| admit(&considered, rule, &mut list, decided.counted.len()));
        list.push(considered);
        let Some(taken) = taken else { continue };
        if taken.is_ok()
            && let Some(last) = list.last_mut()
        {
            (last.needed, last.kernel) = (true, Some(decided.counted.len() as u32));
            decided.counted.push(number);
        }
        decided.rules.push(KernelRule { rule: number, decided: taken });
    }
    for it in list {
        if let (true, Ok(compares)) = (it.needed, it.compares) {
            let last = compares.is_empty();
            decided.entries.push(ProgramRule { compares, to_kernel: it.kernel });
            // A rule that matches everything hides all later ones.
            if last {
                break;
            }
        }
    }
    decided
}

/// Returns whether the last action of a rule is `kernel`.
fn to_kernel(rule: &Rule) -> bool {
    rule.actions().last() == Some(&Action::Kernel)
}

/// A rule under consideration.
struct CandidateRule {
    number: usize,
    set: FieldSet,
    compares: Result<Vec<MaskedCompare>, String>,
    needed: bool,
    kernel: Option<u32>,
}

/// Checks that the program can decide a rule with the action `kernel`, and marks the earlier rules that it
/// needs for that.
fn admit(it: &CandidateRule, rule: &Rule, above: &mut [CandidateRule], counted: usize) -> Result<(), String> {
    it.compares.as_ref().map_err(Clone::clone)?;
    // The program counts packets itself; a mark has no meaning for the kernel.
    let other =
        rule.actions().iter().find(|action| !matches!(action, Action::Count | Action::Mark(_) | Action::Kernel));
    if let Some(action) = other {
        return Err(format!("the XDP program does not support the action \"{}\"", action.spec().name));
    }
    let overlapping: Vec<usize> =
        (0..above.len()).filter(|&i| above[i].kernel.is_none() && overlaps(&above[i].set, &it.set)).collect();
    if let Some((number, why)) =
        overlapping.iter().find_map(|&i| Some((above[i].number, above[i].compares.as_ref().err()?)))
    {
        return Err(format!("rule {number} comes first, overlaps it, and cannot be decided in the XDP program: {why}"));
    }
    let entries = above.iter().filter(|other| other.needed).count();
    let more = overlapping.iter().filter(|&&i| !above[i].needed).count();
    if entries + more >= MAX_RULES || counted >= MAX_RULES {
        return Err(format!("the XDP program has room for {MAX_RULES} rules"));
    }
    overlapping.iter().for_each(|&i| above[i].needed = true);
    Ok(())
}

/// Returns the comparisons for a pattern, or the reason why the program cannot match it.
pub(super) fn compile_pattern(set: &FieldSet) -> Result<Vec<MaskedCompare>, String> {
    let mut list = Vec::new();
    for &(key, bits) in set.list() {
        list.extend(compile_field(set, key, bits)?);
    }
    Ok(list)
}

fn compile_field(set: &FieldSet, key: Key, bits: MaskedValue) -> Result<Option<MaskedCompare>, String> {
    let cannot = |what: &str| Err(format!("the XDP program does not match {what}"));
    if key.level > 0 {
        return cannot("headers inside a tunnel");
    }
    let byte = |at| Ok(Some(MaskedCompare { at, bytes: vec![(bits.mask as u8, bits.value as u8)] }));
    let field = match key.kind {
        KeyKind::HeaderType(HeaderType::Link) => return Ok(None),
        KeyKind::HeaderType(HeaderType::Network) => return byte(fact::NETWORK),
        KeyKind::HeaderType(HeaderType::Transport) if bits.value == 47 => return cannot("GRE headers"),
        KeyKind::HeaderType(HeaderType::Transport) => return byte(fact::TRANSPORT),
        KeyKind::HeaderType(HeaderType::Tunnel) => return cannot("tunnel headers"),
        KeyKind::HeaderType(HeaderType::Mpls) => {
            // The program does not parse behind labels, so every header that it finds precedes them.
            let found = [HeaderType::Network, HeaderType::Transport];
            let plain =
                found.iter().any(|&fact| set.get(Key::header_type(0, fact)).is_some_and(|bits| bits.value != 0));
            let none = bits.value == 0 && bits.mask == u128::from(mpls::AFTER_ETHERNET);
            return if none && plain { Ok(None) } else { cannot("MPLS labels") };
        }
        KeyKind::Field(field) => field,
    };
    let spec = field.spec();
    let header = match (field, spec.item) {
        // The port is this one; rules of other ports were skipped.
        (Field::PortId, _) => return Ok(None),
        (_, ItemKind::Meta) => return cannot("marks and data of packets"),
        (Field::EthType, _) => return Ok(Some(header_compare(fact::ETHERTYPE, 0, 16, bits))),
        (Field::EthTags, _) => return byte(fact::TAGS),
        (Field::VlanTpid, _) => return Ok(Some(header_compare(LINK + 12 + 4 * i16::from(key.nth), 0, 16, bits))),
        (Field::Ipv4Frag | Field::Ipv6Frag, _) => return byte(fact::FRAGMENT),
        (Field::Ipv6Proto, _) => return byte(fact::PROTOCOL),
        (Field::Ipv6Ext, _) => return byte(fact::EXTENSIONS),
        (_, ItemKind::Eth) => LINK,
        (_, ItemKind::Vlan) => LINK + 14 + 4 * i16::from(key.nth),
        (_, ItemKind::Arp | ItemKind::Ipv4 | ItemKind::Ipv6) => NETWORK,
        (_, ItemKind::Tcp | ItemKind::Udp | ItemKind::Icmp | ItemKind::Icmpv6 | ItemKind::Esp) => TRANSPORT,
        (_, item) => return cannot(&format!("{} headers", item.spec().name)),
    };
    match spec.offset {
        Some(offset) => Ok(Some(header_compare(header, offset, spec.bits, bits))),
        None => cannot(&format!("{} {}", spec.item.spec().name, spec.name)),
    }
}

/// Converts bits of a header field to bytes on the stack.
fn header_compare(header: i16, offset: u16, count: u8, bits: MaskedValue) -> MaskedCompare {
    let first = offset / 8;
    let last = (offset + u16::from(count)).div_ceil(8);
    // Distance of the field from the right end of its bytes.
    let behind = u32::from(last * 8 - offset - u16::from(count));
    let length = usize::from(last - first);
    let bytes = |value: u128| {
        (0..length).map(move |i| {
            // A field of 128 bits starts at a byte boundary.
            let shift = 8 * (length - 1 - i) as u32;
            let moved = if shift >= behind { value >> (shift - behind) } else { value << (behind - shift) };
            moved as u8
        })
    };
    let bytes = bytes(bits.mask).zip(bytes(bits.value)).collect();
    MaskedCompare { at: header + first as i16, bytes }
}

/// Counter numbers that stay with a rule while the list around it changes.
#[derive(Clone, Debug, Default)]
pub(super) struct CounterSlots {
    numbers: HashMap<Rule, u32>,
    free: Vec<u32>,
    next: u32,
}

/// Number of counters in the map. The old list still counts while the new one is being installed.
pub(super) const COUNTERS: u32 = 2 * MAX_RULES as u32;

impl CounterSlots {
    /// Assigns counter numbers to the entries. Numbers of removed rules are reused only after the next call.
    /// Returns the counters that must be reset first.
    pub(super) fn assign(&mut self, rules: &[Rule], decided: &mut CompiledRules) -> Vec<u32> {
        let mut before = std::mem::take(&mut self.numbers);
        let mut new_slots = Vec::new();
        let mut numbers = Vec::new();
        for &rule in &decided.counted {
            let number = match before.remove(&rules[rule]).or_else(|| self.numbers.get(&rules[rule]).copied()) {
                Some(number) => number,
                None => {
                    let number = self.free.pop().unwrap_or_else(|| {
                        self.next += 1;
                        self.next - 1
                    });
                    new_slots.push(number);
                    number
                }
            };
            self.numbers.insert(rules[rule].clone(), number);
            numbers.push(number);
        }
        self.free.extend(before.into_values());
        for entry in &mut decided.entries {
            entry.to_kernel = entry.to_kernel.map(|index| numbers[index as usize]);
        }
        new_slots
    }

    /// Returns the counter number of a rule.
    pub(super) fn slot_of(&self, rule: &Rule) -> Option<u32> {
        self.numbers.get(rule).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str]) -> Vec<Rule> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn outcome(texts: &[&str]) -> (usize, Vec<(usize, Option<String>)>) {
        let decided = compile(&rules(texts), PortId::new(1));
        (decided.entries.len(), decided.rules.into_iter().map(|it| (it.rule, it.decided.err())).collect())
    }

    #[test]
    fn only_rules_with_kernel_and_what_overlaps_above_them() {
        let (entries, kernel) = outcome(&[
            "ingress: ipv4 dst 10.0.0.1 / tcp dst 22 => drop",
            "ingress: ipv6 => drop",
            "ingress: ipv4 dst 10.0.0.1 => count, kernel",
            "ingress: any => redirect 2",
        ]);
        assert_eq!((entries, kernel), (2, vec![(2, None)]));
        // Rules of other ports and egress rules need nothing.
        assert_eq!(outcome(&["ingress: port id 2 / arp => kernel", "egress: any => drop"]), (0, vec![]));
        assert_eq!(outcome(&["ingress: port id 1 / arp => kernel"]), (1, vec![(0, None)]));
    }

    #[test]
    fn priority_holds_where_a_rule_above_cannot_be_expressed() {
        let (entries, kernel) = outcome(&[
            "ingress: udp dst 4789 / vxlan vni 7 => drop",
            "ingress: ipv4 => kernel",
            "ingress: arp => kernel",
        ]);
        assert_eq!(entries, 1, "ARP alone");
        let (rule, why) = &kernel[0];
        assert_eq!(
            (*rule, why.as_deref()),
            (
                1,
                Some(
                    "rule 0 comes first, overlaps it, and cannot be decided in the XDP program: the XDP program \
                     does not match tunnel headers"
                )
            )
        );
        assert_eq!(kernel[1], (2, None));
        // An earlier rule with `kernel` that only software can apply blocks too.
        let (entries, kernel) =
            outcome(&["ingress: arp op 1 => set eth dst 02:00:00:00:00:01, kernel", "ingress: arp => kernel"]);
        assert_eq!(entries, 2);
        assert_eq!(kernel[0].1.as_deref(), Some("the XDP program does not support the action \"set\""));
        assert_eq!(kernel[1].1, None);
    }

    #[test]
    fn room_is_bounded() {
        let texts: Vec<String> = (0..300).map(|n| format!("ingress: udp dst {n} => kernel")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let (entries, kernel) = outcome(&texts);
        assert_eq!((entries, kernel.iter().filter(|(_, why)| why.is_none()).count()), (MAX_RULES, MAX_RULES));
        assert!(kernel[299].1.as_ref().is_some_and(|why| why.contains("room for 256")));
    }

    #[test]
    fn bits_of_headers_as_bytes() {
        let whole = header_compare(0, 96, 32, MaskedValue::exact(0x0a00_0001, 32));
        assert_eq!(whole, MaskedCompare { at: 12, bytes: vec![(255, 10), (255, 0), (255, 0), (255, 1)] });
        // A field of 12 bits behind 4.
        assert_eq!(
            header_compare(0, 4, 12, MaskedValue::exact(0xabc, 12)),
            MaskedCompare { at: 0, bytes: vec![(0x0f, 0x0a), (0xff, 0xbc)] }
        );
        // The 9 flags of TCP: one bit in byte 12.
        assert_eq!(header_compare(0, 103, 9, MaskedValue { value: 0x102, mask: 0x1ff }).bytes, [(1, 1), (0xff, 2)]);
        // 3 bits, then 5.
        assert_eq!(header_compare(0, 20, 3, MaskedValue::exact(5, 3)).bytes, [(0x0e, 0x0a)]);
        let wide = header_compare(0, 64, 128, MaskedValue::exact(u128::MAX - 1, 128));
        assert_eq!((wide.bytes.len(), wide.bytes[15], wide.bytes[0]), (16, (255, 254), (255, 255)));
    }

    #[test]
    fn counters_stay_with_their_rules() {
        let mut counters = CounterSlots::default();
        let mut list = |texts: &[&str]| {
            let rules = rules(texts);
            let mut decided = compile(&rules, PortId::new(0));
            let new_slots = counters.assign(&rules, &mut decided);
            (decided.entries.iter().filter_map(|entry| entry.to_kernel).collect::<Vec<_>>(), new_slots)
        };
        let (arp, v4, v6) = ("ingress: arp => kernel", "ingress: ipv4 => kernel", "ingress: ipv6 => kernel");
        assert_eq!(list(&[arp, v4]), (vec![0, 1], vec![0, 1]));
        assert_eq!(list(&[v6, v4]), (vec![2, 1], vec![2]), "the counter of a removed rule is not reused at once");
        assert_eq!(list(&[arp, v6]), (vec![0, 2], vec![0]));
        assert_eq!(list(&[arp, v6]), (vec![0, 2], vec![]));
    }
}
