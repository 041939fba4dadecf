//! Which rules the XDP program decides, and why not the others.

use std::collections::HashMap;

use super::classify::{Compare, Entry, LINK, NETWORK, TRANSPORT, fact};
use crate::flow::{Action, Bits, Direction, Fact, Field, FieldSet, ItemKind, Key, Rule, What, mpls, overlaps};
use crate::port::{KernelRule, PortId};

/// Most rules of the program. The kernel's verifier follows a million instructions at most.
const MOST: usize = 256;

/// What the program decides of a list of rules.
#[derive(Debug, Default)]
pub(super) struct Decided {
    /// The rules of the program, in order.
    pub(super) entries: Vec<Entry>,
    /// The rules whose packets go to the kernel: those of the counters, by their number.
    pub(super) counted: Vec<usize>,
    /// What became of each rule with the action `kernel`.
    pub(super) rules: Vec<KernelRule>,
}

/// Decides for rules in the order in which they are asked. Those of egress and of other ports are passed over.
pub(super) fn decide(rules: &[Rule], port: PortId) -> Decided {
    let mut list: Vec<Considered> = Vec::new();
    let mut decided = Decided::default();
    for (number, rule) in rules.iter().enumerate() {
        let set = rule.fields();
        let elsewhere = set.get(Key::field(0, Field::PortId)).is_some_and(|bits| !bits.matches(port.into()));
        if rule.direction() == Direction::Egress || elsewhere {
            continue;
        }
        let considered = Considered { number, compares: compares(&set), set, needed: false, kernel: None };
        let taken = to_kernel(rule).then(|| place(&considered, rule, &mut list, decided.counted.len()));
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
            decided.entries.push(Entry { compares, to_kernel: it.kernel });
            // Nothing comes to the rules behind one that takes everything.
            if last {
                break;
            }
        }
    }
    decided
}

/// Whether a rule ends at the kernel.
fn to_kernel(rule: &Rule) -> bool {
    rule.actions().last() == Some(&Action::Kernel)
}

/// A rule of the list, on the way.
struct Considered {
    number: usize,
    set: FieldSet,
    compares: Result<Vec<Compare>, String>,
    needed: bool,
    kernel: Option<u32>,
}

/// Whether the program can decide a rule with `kernel`; if so, the rules above that it needs are marked.
fn place(it: &Considered, rule: &Rule, above: &mut [Considered], counted: usize) -> Result<(), String> {
    it.compares.as_ref().map_err(Clone::clone)?;
    // Counting is done there; a mark is of no use to the kernel.
    let other =
        rule.actions().iter().find(|action| !matches!(action, Action::Count | Action::Mark(_) | Action::Kernel));
    if let Some(action) = other {
        return Err(format!("the XDP program does not do \"{}\"", action.spec().name));
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
    if entries + more >= MOST || counted >= MOST {
        return Err(format!("the XDP program has room for {MOST} rules"));
    }
    overlapping.iter().for_each(|&i| above[i].needed = true);
    Ok(())
}

/// What the program compares for a pattern, or what it cannot look at.
pub(super) fn compares(set: &FieldSet) -> Result<Vec<Compare>, String> {
    let mut list = Vec::new();
    for &(key, bits) in set.list() {
        list.extend(compare(set, key, bits)?);
    }
    Ok(list)
}

fn compare(set: &FieldSet, key: Key, bits: Bits) -> Result<Option<Compare>, String> {
    let cannot = |what: &str| Err(format!("the XDP program does not look at {what}"));
    if key.level > 0 {
        return cannot("headers inside a tunnel");
    }
    let byte = |at| Ok(Some(Compare { at, bytes: vec![(bits.mask as u8, bits.value as u8)] }));
    let field = match key.what {
        What::Fact(Fact::Link) => return Ok(None),
        What::Fact(Fact::Network) => return byte(fact::NETWORK),
        What::Fact(Fact::Transport) if bits.value == 47 => return cannot("GRE headers"),
        What::Fact(Fact::Transport) => return byte(fact::TRANSPORT),
        What::Fact(Fact::Tunnel) => return cannot("tunnel headers"),
        What::Fact(Fact::Mpls) => {
            // Behind labels the program finds nothing, so what it finds is not behind labels.
            let found = [Fact::Network, Fact::Transport];
            let plain = found.iter().any(|&fact| set.get(Key::fact(0, fact)).is_some_and(|bits| bits.value != 0));
            let none = bits.value == 0 && bits.mask == u128::from(mpls::BEHIND_LINK);
            return if none && plain { Ok(None) } else { cannot("MPLS labels") };
        }
        What::Field(field) => field,
    };
    let spec = field.spec();
    let header = match (field, spec.item) {
        // The port is this one, or the rule would not be here.
        (Field::PortId, _) => return Ok(None),
        (_, ItemKind::Meta) => return cannot("marks and data of packets"),
        (Field::EthType, _) => return Ok(Some(at(fact::ETHERTYPE, 0, 16, bits))),
        (Field::EthTags, _) => return byte(fact::TAGS),
        (Field::VlanTpid, _) => return Ok(Some(at(LINK + 12 + 4 * i16::from(key.nth), 0, 16, bits))),
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
        Some(offset) => Ok(Some(at(header, offset, spec.bits, bits))),
        None => cannot(&format!("{} {}", spec.item.spec().name, spec.name)),
    }
}

/// Bits of a header as bytes on the stack.
fn at(header: i16, offset: u16, count: u8, bits: Bits) -> Compare {
    let first = offset / 8;
    let last = (offset + u16::from(count)).div_ceil(8);
    // So far from the right end of the bytes.
    let behind = u32::from(last * 8 - offset - u16::from(count));
    let length = usize::from(last - first);
    let bytes = |value: u128| {
        (0..length).map(move |i| {
            // A field of 128 bits begins with its byte.
            let shift = 8 * (length - 1 - i) as u32;
            let moved = if shift >= behind { value >> (shift - behind) } else { value << (behind - shift) };
            moved as u8
        })
    };
    let bytes = bytes(bits.mask).zip(bytes(bits.value)).collect();
    Compare { at: header + first as i16, bytes }
}

/// Numbers of counters that stay with a rule while the list around it changes.
#[derive(Clone, Debug, Default)]
pub(super) struct Counters {
    numbers: HashMap<Rule, u32>,
    free: Vec<u32>,
    next: u32,
}

/// Counters of the map. One list is counted while the one before it still is.
pub(super) const COUNTERS: u32 = 2 * MOST as u32;

impl Counters {
    /// Gives the entries the numbers of their rules' counters; those of rules that have gone can be given to others after the next
    /// call. Returns the counters that must be set to zero first.
    pub(super) fn assign(&mut self, rules: &[Rule], decided: &mut Decided) -> Vec<u32> {
        let mut before = std::mem::take(&mut self.numbers);
        let mut fresh = Vec::new();
        let mut numbers = Vec::new();
        for &rule in &decided.counted {
            let number = match before.remove(&rules[rule]).or_else(|| self.numbers.get(&rules[rule]).copied()) {
                Some(number) => number,
                None => {
                    let number = self.free.pop().unwrap_or_else(|| {
                        self.next += 1;
                        self.next - 1
                    });
                    fresh.push(number);
                    number
                }
            };
            self.numbers.insert(rules[rule].clone(), number);
            numbers.push(number);
        }
        self.free.extend(before.into_values());
        for entry in &mut decided.entries {
            entry.to_kernel = entry.to_kernel.map(|place| numbers[place as usize]);
        }
        fresh
    }

    /// The counter of a rule.
    pub(super) fn of(&self, rule: &Rule) -> Option<u32> {
        self.numbers.get(rule).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(texts: &[&str]) -> Vec<Rule> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn said(texts: &[&str]) -> (usize, Vec<(usize, Option<String>)>) {
        let decided = decide(&rules(texts), 1);
        (decided.entries.len(), decided.rules.into_iter().map(|it| (it.rule, it.decided.err())).collect())
    }

    #[test]
    fn only_rules_with_kernel_and_what_overlaps_above_them() {
        let (entries, kernel) = said(&[
            "ingress: ipv4 dst 10.0.0.1 / tcp dst 22 => drop",
            "ingress: ipv6 => drop",
            "ingress: ipv4 dst 10.0.0.1 => count, kernel",
            "ingress: any => redirect 2",
        ]);
        assert_eq!((entries, kernel), (2, vec![(2, None)]));
        // Of another port, and at egress, nothing is to be done.
        assert_eq!(said(&["ingress: port id 2 / arp => kernel", "egress: any => drop"]), (0, vec![]));
        assert_eq!(said(&["ingress: port id 1 / arp => kernel"]), (1, vec![(0, None)]));
    }

    #[test]
    fn priority_holds_where_a_rule_above_cannot_be_expressed() {
        let (entries, kernel) =
            said(&["ingress: udp dst 4789 / vxlan vni 7 => drop", "ingress: ipv4 => kernel", "ingress: arp => kernel"]);
        assert_eq!(entries, 1, "ARP alone");
        let (rule, why) = &kernel[0];
        assert_eq!(
            (*rule, why.as_deref()),
            (
                1,
                Some(
                    "rule 0 comes first, overlaps it, and cannot be decided in the XDP program: the XDP program does not look at tunnel headers"
                )
            )
        );
        assert_eq!(kernel[1], (2, None));
        // A kernel rule that only software can do is one of those above.
        let (entries, kernel) =
            said(&["ingress: arp op 1 => set eth dst 02:00:00:00:00:01, kernel", "ingress: arp => kernel"]);
        assert_eq!(entries, 2);
        assert_eq!(kernel[0].1.as_deref(), Some("the XDP program does not do \"set\""));
        assert_eq!(kernel[1].1, None);
    }

    #[test]
    fn room_is_bounded() {
        let texts: Vec<String> = (0..300).map(|n| format!("ingress: udp dst {n} => kernel")).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let (entries, kernel) = said(&texts);
        assert_eq!((entries, kernel.iter().filter(|(_, why)| why.is_none()).count()), (MOST, MOST));
        assert!(kernel[299].1.as_ref().is_some_and(|why| why.contains("room for 256")));
    }

    #[test]
    fn bits_of_headers_as_bytes() {
        let whole = at(0, 96, 32, Bits::exact(0x0a00_0001, 32));
        assert_eq!(whole, Compare { at: 12, bytes: vec![(255, 10), (255, 0), (255, 0), (255, 1)] });
        // 12 bits behind 4.
        assert_eq!(at(0, 4, 12, Bits::exact(0xabc, 12)), Compare { at: 0, bytes: vec![(0x0f, 0x0a), (0xff, 0xbc)] });
        // 9 flags of TCP: 7 bits into byte 12.
        assert_eq!(at(0, 103, 9, Bits { value: 0x102, mask: 0x1ff }).bytes, [(1, 1), (0xff, 2)]);
        // 3 bits, then 5.
        assert_eq!(at(0, 20, 3, Bits::exact(5, 3)).bytes, [(0x0e, 0x0a)]);
        let wide = at(0, 64, 128, Bits::exact(u128::MAX - 1, 128));
        assert_eq!((wide.bytes.len(), wide.bytes[15], wide.bytes[0]), (16, (255, 254), (255, 255)));
    }

    #[test]
    fn counters_stay_with_their_rules() {
        let mut counters = Counters::default();
        let mut list = |texts: &[&str]| {
            let rules = rules(texts);
            let mut decided = decide(&rules, 0);
            let fresh = counters.assign(&rules, &mut decided);
            (decided.entries.iter().filter_map(|entry| entry.to_kernel).collect::<Vec<_>>(), fresh)
        };
        let (arp, v4, v6) = ("ingress: arp => kernel", "ingress: ipv4 => kernel", "ingress: ipv6 => kernel");
        assert_eq!(list(&[arp, v4]), (vec![0, 1], vec![0, 1]));
        assert_eq!(
            list(&[v6, v4]),
            (vec![2, 1], vec![2]),
            "the counter of a rule that has just gone is not given away"
        );
        assert_eq!(list(&[arp, v6]), (vec![0, 2], vec![0]));
        assert_eq!(list(&[arp, v6]), (vec![0, 2], vec![]));
    }
}
