//! Random rules. The seed reproduces a failure.

use wirepath_packet::PortId;
use wirepath_wire::{EtherType, Tag};

use super::super::masked_value::ones;
use super::super::*;
use super::reformats;

/// Generator of random rules.
pub(crate) struct RuleGenerator(fastrand::Rng);

impl RuleGenerator {
    pub(crate) fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub(crate) fn wide(&mut self) -> u128 {
        self.0.u128(..)
    }

    /// Returns a random value and mask of a field. Few values are used, so that rules overlap.
    pub(crate) fn bits(&mut self, field: Field) -> MaskedValue {
        let spec = field.spec();
        let all = ones(spec.bits);
        let value = match field {
            Field::EthType => self.pick(&[0x0800, 0x86dd, 0x0806, 0x8847, 0x8848, 0x88cc]),
            Field::GreProto | Field::GeneveProto => self.pick(&[0x6558, 0x0800, 0x86dd, 0x8847]),
            Field::Ipv4Proto | Field::Ipv6Proto | Field::Ipv6Next => self.pick(&[1, 4, 6, 17, 41, 44, 47, 50, 58]),
            Field::GpeNext => self.pick(&[1, 2, 3]),
            _ => match self.below(3) {
                0 => u128::from(self.below(3)),
                1 => all.saturating_sub(self.below(3).into()),
                _ => self.wide(),
            },
        };
        let mask = match self.below(6) {
            // Masked codes exclude values that are not tracked through the chain of IPv6 headers.
            _ if field == Field::Ipv6Next => all,
            0 => MaskedValue::prefix(0, self.below(u64::from(spec.bits) + 1) as u8, spec.bits).mask,
            1 => self.wide() & all,
            _ => all,
        };
        MaskedValue { value: value & mask, mask }
    }

    fn item(&mut self, kind: ItemKind) -> Item {
        let mut item = Item::new(kind);
        for &field in kind.spec().fields {
            if self.one_in(4) {
                let bits = self.bits(field);
                item = item.with(field, bits);
            }
        }
        item
    }

    /// Adds one stack, which is sometimes impossible.
    fn stack(&mut self, items: &mut Vec<Item>, inner: bool) {
        let mut made = 0;
        let mut add = |random: &mut Self, kind| {
            made += 1;
            let item = random.item(kind);
            items.push(if inner { item.as_inner() } else { item });
        };
        if !inner && self.one_in(4) {
            add(self, ItemKind::Port);
        }
        if !inner && self.one_in(4) {
            add(self, ItemKind::Meta);
        }
        if self.one_in(2) {
            add(self, ItemKind::Eth);
        }
        for _ in 0..self.below(6).saturating_sub(3) {
            add(self, ItemKind::Vlan);
        }
        if self.one_in(6) {
            for _ in 0..=self.below(3) {
                add(self, ItemKind::Mpls);
            }
        }
        match self.below(6) {
            0 | 1 => add(self, ItemKind::Ipv4),
            2 | 3 => add(self, ItemKind::Ipv6),
            4 if self.one_in(3) => return add(self, ItemKind::Arp),
            _ => {}
        }
        if self.one_in(2) {
            let kind = self.pick(&[
                ItemKind::Tcp,
                ItemKind::Udp,
                ItemKind::Udp,
                ItemKind::Gre,
                ItemKind::Gre,
                ItemKind::Icmp,
                ItemKind::Icmpv6,
                ItemKind::Esp,
            ]);
            add(self, kind);
        }
        if self.one_in(3) {
            let kind =
                self.pick(&[ItemKind::Vxlan, ItemKind::Vxlan, ItemKind::VxlanGpe, ItemKind::Geneve, ItemKind::Mpls]);
            add(self, kind);
        }
        if made == 0 && inner {
            items.push(self.item(ItemKind::Ipv4).as_inner());
        }
    }

    pub(crate) fn pattern(&mut self) -> Vec<Item> {
        let mut items = Vec::new();
        self.stack(&mut items, false);
        if self.one_in(2) {
            self.stack(&mut items, true);
        }
        items
    }

    fn action(&mut self) -> Action {
        let port = PortId::new(self.below(4) as u16);
        match self.below(12) {
            0 => Action::Mirror(port),
            1 => Action::Count,
            2 => Action::Mark(self.below(1 << 24) as u32),
            3 => Action::Limit(Limit {
                rate: self.below(100_000) + 1,
                unit: self.pick(&[RateUnit::Packets, RateUnit::Bits]),
                burst: self.below(50) * 1000 + 1000,
            }),
            4 => Action::DecTtl,
            5 => Action::PushVlan(Tag {
                tpid: self.pick(&[EtherType::VLAN, EtherType::QINQ]),
                tci: (self.below(16) << 12 | self.below(0xfff)) as u16,
            }),
            6 => Action::PopVlan,
            7 => {
                let settable: Vec<Field> = FIELDS.iter().filter(|f| f.settable).map(|f| f.field).collect();
                let field = self.pick(&settable);
                Action::Set { field, value: self.wide() & ones(field.spec().bits) }
            }
            _ => Action::Reformat(reformats::any(self)),
        }
    }

    fn terminating(&mut self) -> Action {
        match self.below(5) {
            0 => Action::Drop,
            1 => Action::Queue(self.next() as u16),
            2 => Action::Kernel,
            3 => Action::Redirect(PortId::new(self.below(9) as u16)),
            _ => Action::Rss(Rss {
                queues: (0..=self.below(5)).map(|_| self.below(6) as u16).collect(),
                on: HashFields(self.below(63) as u8 | 1),
                key: self.one_in(2).then(|| std::array::from_fn(|_| self.next() as u8)),
            }),
        }
    }

    /// Returns a valid rule: invalid ones are discarded.
    pub(crate) fn rule(&mut self) -> Rule {
        loop {
            let direction = self.pick(&[Direction::Ingress, Direction::Egress]);
            let priority = if self.one_in(2) { self.below(4) as u32 } else { self.next() as u32 };
            let pattern = self.pattern();
            let mut actions: Vec<Action> = (0..self.below(3)).map(|_| self.action()).collect();
            if self.one_in(2) {
                actions.push(self.terminating());
            }
            if let Ok(rule) = Rule::new(direction, priority, pattern, actions) {
                return rule;
            }
        }
    }
}
