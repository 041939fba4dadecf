//! Header stacks in the words of the rule language, with ranges and lists of values: the flows of a stack.
//!
//! ```text
//! stack  = item { "/" item }
//! item   = [ "inner" ] name { field values }
//! values = value | first "-" last | prefix | value "," value { "," value }
//! ```
//!
//! Items, fields and values are those of flow rules ([`wirepath_flow::ITEMS`]). Lengths, checksums and the types that
//! name the next header are filled in. The flows are all combinations of the values; the first field varies fastest.

use std::ops::Range;

use wirepath_flow::{Direction, Field, Format, Item, ItemKind, Rule, TEB, ones};
use wirepath_settings::nearest;
use wirepath_wire::checksum::{self, Sum, Transport};
use wirepath_wire::{EtherType, IpProtocol, MacAddr, geneve, gre, ipv4, mpls, vxlan, vxlan_gpe};

/// Most flows of a stack.
pub const MAX_FLOWS: u64 = 1 << 20;

/// Local experimental EtherType 1 (IEEE 802), for payloads that follow Ethernet.
const EXPERIMENTAL_TYPE: u128 = 0x88b5;
/// IP protocol for experiments (RFC 3692), for payloads that follow IP.
const EXPERIMENTAL_PROTOCOL: u128 = 253;
/// UDP port of the discard service (RFC 863).
const DISCARD: u128 = 9;
/// Type of Ethernet in IP (RFC 8986 section 10.1).
const ETHERNET_IN_IP: u128 = 143;
/// Address of inner Ethernet headers, and of peers without a known address.
const PEER: MacAddr = MacAddr::new(0x02, 0, 0, 0, 0, 0x02);
const INNER: MacAddr = MacAddr::new(0x02, 0, 0, 0, 0, 0x01);

/// The values of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Values {
    Range { first: u128, count: u64 },
    List(Vec<u128>),
}

impl Values {
    fn count(&self) -> u64 {
        match self {
            Self::Range { count, .. } => *count,
            Self::List(list) => list.len() as u64,
        }
    }

    fn value(&self, n: u64) -> u128 {
        match self {
            Self::Range { first, .. } => first + u128::from(n),
            Self::List(list) => list[n as usize],
        }
    }
}

/// Bits of a frame: an offset and a length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bits {
    at: usize,
    len: u8,
}

impl Bits {
    /// Writes a value, most significant bit first.
    fn set(self, frame: &mut [u8], value: u128) {
        for i in 0..usize::from(self.len) {
            let (bit, set) = (self.at + i, value >> (usize::from(self.len) - 1 - i) & 1 != 0);
            let mask = 0x80 >> (bit % 8);
            let byte = &mut frame[bit / 8];
            *byte = if set { *byte | mask } else { *byte & !mask };
        }
    }
}

/// A header of the stack.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Header {
    kind: ItemKind,
    range: Range<usize>,
    /// Range of the IP header in front of it, for the pseudo header of a checksum.
    ip: Option<(ItemKind, usize)>,
    /// True if the header has a checksum over all that follows, which is written.
    has_sum: bool,
    /// True if a header in front of it needs the sum of its bytes.
    is_summed: bool,
}

/// A header stack, and the values of its fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    headers: Vec<Header>,
    template: Vec<u8>,
    varying: Vec<(Bits, Values)>,
    has_source: bool,
    has_destination: bool,
}

/// A field with its values, as written.
struct Given {
    field: Field,
    values: Values,
}

fn parse_values(field: Field, text: &str) -> Result<Values, String> {
    let spec = field.spec();
    let at = |message: String| format!("{} {}: {message}", spec.item.spec().name, spec.name);
    let one = |text: &str| match spec.format.parse_value(spec.bits, text) {
        Ok(value) if value.mask == ones(spec.bits) => Ok(value.value),
        Ok(value) if matches!(spec.format, Format::Flags(_)) => Ok(value.value),
        Ok(_) => Err(at(format!("found \"{text}\", expected one value here"))),
        Err(message) => Err(at(message)),
    };
    if text.contains(',') {
        return Ok(Values::List(text.split(',').map(one).collect::<Result<_, _>>()?));
    }
    if let Some((first, last)) = text.split_once('-').filter(|_| !matches!(spec.format, Format::Flags(_))) {
        let (first, last) = (one(first)?, one(last)?);
        if last < first {
            return Err(at(format!("the range {text} is empty, because its end is below its start")));
        }
        return Ok(Values::Range { first, count: u64::try_from(last - first).unwrap_or(u64::MAX).saturating_add(1) });
    }
    match spec.format.parse_value(spec.bits, text) {
        Ok(value) if matches!(spec.format, Format::Ipv4 | Format::Ipv6) => {
            let count = u64::try_from(ones(spec.bits) & !value.mask).unwrap_or(u64::MAX).saturating_add(1);
            Ok(Values::Range { first: value.value, count })
        }
        _ => Ok(Values::Range { first: one(text)?, count: 1 }),
    }
}

/// An item as written: kind, the word `inner`, fields.
struct Written {
    kind: ItemKind,
    inner: bool,
    given: Vec<Given>,
}

fn parse_item(words: &[&str]) -> Result<Written, String> {
    let (inner, words) = match words {
        ["inner", rest @ ..] => (true, rest),
        words => (false, words),
    };
    let Some((name, rest)) = words.split_first() else {
        return Err("a header is missing; write headers with \" / \" between them".to_owned());
    };
    let names: Vec<&str> = wirepath_flow::ITEMS.iter().map(|spec| spec.name).collect();
    let kind = ItemKind::from_name(name).ok_or_else(|| match nearest(name, &names) {
        Some(near) => format!("unknown header \"{name}\"; did you mean \"{near}\"?"),
        None => format!("unknown header \"{name}\"; `wirepath flow items` lists them"),
    })?;
    let mut given: Vec<Given> = Vec::new();
    for pair in rest.chunks(2) {
        let fields: Vec<&str> = kind.spec().fields.iter().map(|field| field.name()).collect();
        let field = kind.field(pair[0]).ok_or_else(|| match nearest(pair[0], &fields) {
            Some(near) => format!("unknown field \"{}\" of {name}; did you mean \"{near}\"?", pair[0]),
            None => format!("unknown field \"{}\" of {name}; it has {}", pair[0], fields.join(", ")),
        })?;
        let text = pair.get(1).ok_or_else(|| format!("{name} {}: a value is missing", pair[0]))?;
        if given.iter().any(|other| other.field == field) {
            return Err(format!("{name} {} is given twice", pair[0]));
        }
        given.push(Given { field, values: parse_values(field, text)? });
    }
    Ok(Written { kind, inner, given })
}

/// Splits a text into items, with the Ethernet header that may be left out.
fn parse_items(text: &str) -> Result<Vec<Written>, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut items = words.split(|word| *word == "/").map(parse_item).collect::<Result<Vec<_>, _>>()?;
    if items.first().is_some_and(|item| item.kind != ItemKind::Eth) {
        items.insert(0, Written { kind: ItemKind::Eth, inner: false, given: Vec::new() });
    }
    for item in &items {
        if matches!(item.kind, ItemKind::Port | ItemKind::Meta) {
            let name = item.kind.spec().name;
            return Err(format!("\"{name}\" is metadata of packets and no header"));
        }
    }
    // The rule language knows which headers may follow each other.
    let names = |item: &Written| format!("{}{}", if item.inner { "inner " } else { "" }, item.kind.spec().name);
    let rule = format!("ingress: {} => drop", items.iter().map(names).collect::<Vec<_>>().join(" / "));
    let rule: Rule = rule.parse().map_err(|error: wirepath_flow::TextError| error.message)?;
    debug_assert_eq!(rule.direction(), Direction::Ingress);
    check_order(rule.pattern())?;
    items.iter_mut().zip(rule.pattern()).for_each(|(item, parsed)| item.inner = parsed.inner);
    Ok(items)
}

/// Refuses stacks that patterns may leave incomplete, but packets may not.
fn check_order(items: &[Item]) -> Result<(), String> {
    use ItemKind::{Esp, Eth, Geneve, Gre, Icmp, Icmpv6, Ipv4, Ipv6, Mpls, Tcp, Udp, Vlan, Vxlan, VxlanGpe};
    for pair in items.windows(2) {
        let (before, kind) = (pair[0].kind, pair[1].kind);
        let needs: &[ItemKind] = match kind {
            Tcp | Udp | Esp | Gre => &[Ipv4, Ipv6],
            Icmp => &[Ipv4],
            Icmpv6 => &[Ipv6],
            Vxlan | VxlanGpe | Geneve => &[Udp],
            _ => match before {
                Vxlan => &[Vxlan],
                Eth | Vlan | Mpls | Udp | Gre | VxlanGpe | Geneve | Ipv4 | Ipv6 => &[],
                _ => &[Eth],
            },
        };
        let name = |kind: ItemKind| kind.spec().name;
        if before == Vxlan && kind != Eth {
            return Err(format!("vxlan carries Ethernet frames: write \"vxlan / eth / {}\"", name(kind)));
        }
        if !needs.is_empty() && !needs.contains(&before) && before != Vxlan {
            let needs: Vec<&str> = needs.iter().map(|kind| name(*kind)).collect();
            return Err(format!(
                "\"{}\" cannot follow \"{}\" in a packet; it follows {}",
                name(kind),
                name(before),
                needs.join(" or ")
            ));
        }
        if before == Udp && !matches!(kind, Vxlan | VxlanGpe | Geneve | Mpls) {
            return Err(format!("\"{}\" cannot follow \"udp\" without a tunnel header between them", name(kind)));
        }
    }
    Ok(())
}

/// Returns the bytes of a header with its default values.
fn default_header(kind: ItemKind, with_key: bool) -> Vec<u8> {
    match kind {
        ItemKind::Eth => [&PEER.0[..], &INNER.0, &[0, 0]].concat(),
        ItemKind::Vlan => vec![0, 1, 0, 0],
        ItemKind::Mpls => vec![0, 1, 0, 64],
        ItemKind::Arp => {
            // A request of 198.18.0.1 for 198.19.0.1.
            let mut bytes = vec![0, 1, 8, 0, 6, 4, 0, 1];
            bytes.extend([INNER.0.as_slice(), &[198, 18, 0, 1], &[0; 6], &[198, 19, 0, 1]].concat());
            bytes
        }
        // Addresses of RFC 2544 appendix C.2.2 and RFC 5180 section 8.
        ItemKind::Ipv4 => vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 0, 0, 0, 198, 18, 0, 1, 198, 19, 0, 1],
        ItemKind::Ipv6 => {
            let mut bytes = vec![0x60, 0, 0, 0, 0, 0, 0, 64];
            for host in [1, 2] {
                bytes.extend([0x20, 0x01, 0, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, host]);
            }
            bytes
        }
        // An acknowledgement with data.
        ItemKind::Tcp => vec![0x04, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0],
        ItemKind::Udp => vec![0xc0, 0, 0, 9, 0, 0, 0, 0],
        ItemKind::Icmp => vec![8, 0, 0, 0, 0, 1, 0, 1],
        ItemKind::Icmpv6 => vec![128, 0, 0, 0, 0, 1, 0, 1],
        ItemKind::Esp => vec![0, 0, 1, 0, 0, 0, 0, 1],
        ItemKind::Gre if with_key => vec![0x20, 0, 0, 0, 0, 0, 0, 0],
        ItemKind::Gre => vec![0; 4],
        ItemKind::Vxlan => vec![vxlan::FLAG_VNI, 0, 0, 0, 0, 0, 1, 0],
        ItemKind::VxlanGpe => vec![vxlan_gpe::FLAG_VNI | vxlan_gpe::FLAG_NEXT, 0, 0, 0, 0, 0, 1, 0],
        ItemKind::Geneve => vec![0, 0, 0, 0, 0, 0, 1, 0],
        ItemKind::Port | ItemKind::Meta => Vec::new(),
    }
}

/// Returns the field by which a header names the one that follows, and its value.
fn next_type(kind: ItemKind, next: Option<ItemKind>) -> Option<(Field, u128)> {
    let ethertype = || match next {
        Some(ItemKind::Arp) => EtherType::ARP.0.into(),
        Some(ItemKind::Ipv4) => EtherType::IPV4.0.into(),
        Some(ItemKind::Ipv6) => EtherType::IPV6.0.into(),
        Some(ItemKind::Mpls) => EtherType::MPLS.0.into(),
        Some(ItemKind::Eth) => TEB.into(),
        _ => EXPERIMENTAL_TYPE,
    };
    let protocol = || match next {
        Some(ItemKind::Tcp) => IpProtocol::TCP.0.into(),
        Some(ItemKind::Udp) => IpProtocol::UDP.0.into(),
        Some(ItemKind::Icmp) => 1,
        Some(ItemKind::Icmpv6) => 58,
        Some(ItemKind::Esp) => 50,
        Some(ItemKind::Gre) => 47,
        Some(ItemKind::Ipv4) => 4,
        Some(ItemKind::Ipv6) => 41,
        Some(ItemKind::Eth) => ETHERNET_IN_IP,
        _ => EXPERIMENTAL_PROTOCOL,
    };
    Some(match kind {
        ItemKind::Ipv4 => (Field::Ipv4Proto, protocol()),
        ItemKind::Ipv6 => (Field::Ipv6Next, protocol()),
        ItemKind::Udp => {
            let port = match next {
                Some(ItemKind::Vxlan) => vxlan::PORT.into(),
                Some(ItemKind::VxlanGpe) => vxlan_gpe::PORT.into(),
                Some(ItemKind::Geneve) => geneve::PORT.into(),
                Some(ItemKind::Mpls) => mpls::PORT.into(),
                _ => DISCARD,
            };
            (Field::UdpDst, port)
        }
        ItemKind::Gre => (Field::GreProto, ethertype()),
        ItemKind::Geneve => (Field::GeneveProto, ethertype()),
        ItemKind::VxlanGpe => {
            let next = match next {
                Some(ItemKind::Ipv4) => 1,
                Some(ItemKind::Ipv6) => 2,
                _ => 3,
            };
            (Field::GpeNext, next)
        }
        ItemKind::Eth | ItemKind::Vlan => (Field::EthType, ethertype()),
        ItemKind::Mpls => (Field::MplsBos, u128::from(next != Some(ItemKind::Mpls))),
        _ => return None,
    })
}

impl Stack {
    /// Reads a stack.
    ///
    /// # Errors
    /// The wrong word, and what is expected.
    pub fn parse(text: &str) -> Result<Self, String> {
        let items = parse_items(text)?;
        let mut stack = Self {
            headers: Vec::new(),
            template: Vec::new(),
            varying: Vec::new(),
            has_source: false,
            has_destination: false,
        };
        let mut ip = None;
        let mut ethertype: Option<Values> = None;
        for (i, item) in items.iter().enumerate() {
            let given = |field: Field| item.given.iter().find(|given| given.field == field);
            let with_key = given(Field::GreKey).is_some();
            let at = stack.template.len();
            let next = items.get(i + 1);
            stack.template.extend(default_header(item.kind, with_key));
            let range = at..stack.template.len();
            // A new stack of headers begins in a tunnel.
            if item.kind == ItemKind::Eth {
                ethertype = None;
                if i == 0 {
                    stack.has_destination = given(Field::EthDst).is_some();
                    stack.has_source = given(Field::EthSrc).is_some();
                }
            }
            if let Some((field, value)) = next_type(item.kind, next.map(|next| next.kind)) {
                stack.set_type(item.kind, field, value, at, next.is_some_and(|next| next.kind == ItemKind::Vlan));
            }
            for Given { field, values } in &item.given {
                match field {
                    Field::EthType => ethertype = Some(values.clone()),
                    field => stack.set_field(*field, values, at)?,
                }
            }
            // The type of the frame is behind all of its tags.
            if matches!(item.kind, ItemKind::Eth | ItemKind::Vlan)
                && next.is_none_or(|next| next.kind != ItemKind::Vlan)
                && let Some(values) = ethertype.take()
            {
                stack.add(Bits { at: (range.end - 2) * 8, len: 16 }, &values);
            }
            let is_ip = matches!(item.kind, ItemKind::Ipv4 | ItemKind::Ipv6);
            let carries_tunnel = next.is_some();
            let has_sum = match item.kind {
                ItemKind::Tcp | ItemKind::Icmp | ItemKind::Icmpv6 => true,
                // The checksum of tunnels over IPv4 is zero (RFC 7348 section 5, RFC 8926 section 3.3).
                ItemKind::Udp => !(carries_tunnel && matches!(ip, Some((ItemKind::Ipv4, _)))),
                _ => false,
            };
            let pseudo = ip.filter(|_| !is_ip);
            stack.headers.push(Header { kind: item.kind, range, ip: pseudo, has_sum, is_summed: false });
            if is_ip {
                ip = Some((item.kind, at));
            }
        }
        let mut is_summed = false;
        for header in &mut stack.headers {
            header.is_summed = is_summed;
            is_summed |= header.has_sum;
        }
        if stack.flows() > MAX_FLOWS {
            // `--flows` may take the first ones only, but their number must be a number.
            stack.check_count()?;
        }
        Ok(stack)
    }

    fn check_count(&self) -> Result<(), String> {
        let product = self.varying.iter().try_fold(1u64, |product, (_, values)| product.checked_mul(values.count()));
        product.map(drop).ok_or_else(|| "the ranges have more than 2^64 combinations; make one smaller".to_owned())
    }

    /// Writes the type of the next header.
    fn set_type(&mut self, kind: ItemKind, field: Field, value: u128, at: usize, before_tag: bool) {
        let end = self.template.len();
        match kind {
            ItemKind::Eth | ItemKind::Vlan => {
                // `tpid` of the tag changes it.
                let value = if before_tag { EtherType::VLAN.0.into() } else { value };
                Bits { at: (end - 2) * 8, len: 16 }.set(&mut self.template, value);
            }
            _ => {
                let spec = field.spec();
                let Some(offset) = spec.offset else { return };
                Bits { at: at * 8 + usize::from(offset), len: spec.bits }.set(&mut self.template, value);
            }
        }
    }

    /// Sets a field of the header at `at`.
    fn set_field(&mut self, field: Field, values: &Values, at: usize) -> Result<(), String> {
        let spec = field.spec();
        let refuse = |why: &str| Err(format!("{} {}: {why}", spec.item.spec().name, spec.name));
        let bits = match (field, spec.offset) {
            (Field::VlanTpid, _) => Bits { at: (at - 2) * 8, len: 16 },
            (Field::GreKey, _) => Bits { at: (at + 4) * 8, len: 32 },
            (Field::Ipv4Ihl | Field::Ipv4Mf | Field::Ipv4Offset | Field::Ipv4Frag | Field::Ipv6Frag, _) => {
                return refuse("sent packets are no fragments and have no options");
            }
            (Field::GeneveOptLen, _) => return refuse("sent headers have no options"),
            (Field::GreFlags, _) => return refuse("`key` sets the only flag that is supported"),
            (_, Some(offset)) => Bits { at: at * 8 + usize::from(offset), len: spec.bits },
            (_, None) => return refuse("it follows from the other headers"),
        };
        self.add(bits, values);
        Ok(())
    }

    fn add(&mut self, bits: Bits, values: &Values) {
        bits.set(&mut self.template, values.value(0));
        if values.count() > 1 {
            self.varying.push((bits, values.clone()));
        }
    }

    /// Sets the addresses of the Ethernet header that the text does not name.
    pub fn set_addresses(&mut self, source: Option<MacAddr>, destination: Option<MacAddr>) {
        if let Some(destination) = destination.filter(|_| !self.has_destination) {
            self.template[..6].copy_from_slice(&destination.0);
        }
        if let Some(source) = source.filter(|_| !self.has_source) {
            self.template[6..12].copy_from_slice(&source.0);
        }
    }

    /// Bytes of all headers.
    pub fn len(&self) -> usize {
        self.template.len()
    }

    /// Returns true if there are no headers. [`Self::parse`] returns no such stack.
    pub fn is_empty(&self) -> bool {
        self.template.is_empty()
    }

    /// Number of flows: all combinations of the values.
    pub fn flows(&self) -> u64 {
        self.varying.iter().fold(1, |product, (_, values)| product.saturating_mul(values.count()))
    }

    /// Appends the headers of a flow. Lengths and checksums are those of [`Self::complete`].
    pub fn emit(&self, flow: u64, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.template);
        let mut rest = flow;
        for (bits, values) in &self.varying {
            bits.set(&mut out[start..], values.value(rest % values.count()));
            rest /= values.count();
        }
    }

    /// Writes the lengths and checksums of a frame whose payload follows the headers. `payload` is its sum, and
    /// `payload_len` its length in bytes.
    #[inline]
    pub fn complete(&self, frame: &mut [u8], payload: Sum, payload_len: usize) {
        let mut sum = payload;
        let mut len = payload_len;
        for header in self.headers.iter().rev() {
            let Range { start: at, end } = header.range.clone();
            len += end - at;
            match header.kind {
                ItemKind::Ipv4 => {
                    frame[at + 2..at + 4].copy_from_slice(&(len as u16).to_be_bytes());
                    frame[at + 10..at + 12].fill(0);
                    let checksum = checksum::ipv4_header(&frame[at..at + ipv4::HEADER_LEN]);
                    frame[at + 10..at + 12].copy_from_slice(&checksum.to_be_bytes());
                }
                ItemKind::Ipv6 => {
                    let payload = (len - (end - at)) as u16;
                    frame[at + 4..at + 6].copy_from_slice(&payload.to_be_bytes());
                }
                ItemKind::Udp => {
                    frame[at + 4..at + 6].copy_from_slice(&(len as u16).to_be_bytes());
                    header.checksum(frame, Some(Transport::Udp), sum, len);
                }
                ItemKind::Tcp => header.checksum(frame, Some(Transport::Tcp), sum, len),
                ItemKind::Icmpv6 => header.checksum(frame, Some(Transport::Icmpv6), sum, len),
                ItemKind::Icmp => header.checksum(frame, None, sum, len),
                _ => {}
            }
            if header.is_summed {
                sum = checksum::sum(&frame[at..end]).and(sum);
            }
        }
    }
}

impl Header {
    /// Writes the checksum of a layer-4 header, over `rest` behind it. ICMP of IPv4 has no pseudo header.
    #[inline]
    fn checksum(&self, frame: &mut [u8], transport: Option<Transport>, rest: Sum, len: usize) {
        if !self.has_sum {
            return;
        }
        let pseudo = match (transport, self.ip) {
            (Some(transport), Some((ItemKind::Ipv4, ip))) => {
                let protocol = transport.protocol().0;
                checksum::sum(&frame[ip + 12..ip + 20]).word(protocol.into()).word(len as u16)
            }
            (Some(transport), Some((_, ip))) => {
                checksum::sum(&frame[ip + 8..ip + 40]).word(transport.protocol().0.into()).word32(len as u32)
            }
            _ => Sum::ZERO,
        };
        let field = self.range.start + transport.map_or(2, Transport::checksum_offset);
        frame[field..field + 2].fill(0);
        let total = pseudo.and(checksum::sum(&frame[self.range.clone()])).and(rest);
        let value = transport.map_or_else(|| total.checksum(), |transport| transport.encode(total));
        frame[field..field + 2].copy_from_slice(&value.to_be_bytes());
    }
}

const _: () = assert!(gre::FLAG_KEY == 0x2000);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pktgen::signature::FILLER;

    fn frame(stack: &Stack, flow: u64, payload: usize) -> Vec<u8> {
        let mut frame = Vec::new();
        stack.emit(flow, &mut frame);
        frame.extend_from_slice(&FILLER[..payload]);
        stack.complete(&mut frame, checksum::sum(&FILLER[..payload]), payload);
        frame
    }

    #[test]
    fn a_plain_datagram_has_all_headers() {
        let mut stack = Stack::parse("ipv4 dst 192.0.2.9 / udp dst 4000").unwrap();
        stack.set_addresses(Some(MacAddr([2; 6])), Some(MacAddr([4; 6])));
        let frame = frame(&stack, 0, 18);
        let headers = wirepath_wire::parse(&frame).unwrap();
        let (ip, udp) = (headers.outer().ipv4(&frame).unwrap(), headers.outer().udp(&frame).unwrap());
        assert_eq!((frame.len(), &frame[..6], &frame[6..12]), (60, &[4; 6][..], &[2; 6][..]));
        assert_eq!((ip.dst().octets(), ip.total_len(), ip.checksum_is_valid()), ([192, 0, 2, 9], 46, true));
        assert_eq!((udp.dst_port(), udp.length()), (4000, 26));
    }

    #[test]
    fn values_are_combined_first_field_fastest() {
        let stack = Stack::parse("eth / ipv4 src 10.0.0.1-10.0.0.3 dst 10.1.0.0/31 / udp src 5,9").unwrap();
        assert_eq!(stack.flows(), 12);
        let flow = |n| {
            let mut bytes = Vec::new();
            stack.emit(n, &mut bytes);
            (bytes[29], bytes[33], bytes[35])
        };
        assert_eq!(
            [flow(0), flow(1), flow(3), flow(6), flow(11)],
            [(1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 9), (3, 1, 9)]
        );
    }

    #[test]
    fn two_tags_and_types() {
        let stack = Stack::parse("eth type 0x1234 / vlan vid 7 tpid 0x88a8 / vlan vid 8 pcp 5").unwrap();
        let frame = frame(&stack, 0, 46);
        assert_eq!(frame[12..22], [0x88, 0xa8, 0, 7, 0x81, 0x00, 0xa0, 8, 0x12, 0x34]);
    }

    #[test]
    fn wrong_stacks_name_the_word() {
        for (text, error) in [
            ("ipv5", "unknown header \"ipv5\"; did you mean \"ipv4\"?"),
            ("ipv4 dest 1.2.3.4", "unknown field \"dest\" of ipv4; did you mean \"dst\"?"),
            ("ipv4 dst", "ipv4 dst: a value is missing"),
            ("ipv4 dst 1.2.3", "found \"1.2.3\", expected an IPv4 address"),
            ("ipv4 dst 10.0.0.9-10.0.0.1", "its end is below its start"),
            ("ipv4 dst 10.0.0.1 dst 10.0.0.2", "given twice"),
            ("udp", "\"udp\" cannot follow \"eth\" in a packet; it follows ipv4 or ipv6"),
            ("ipv4 / icmpv6", "layer 3 cannot be both ipv4 and ipv6"),
            ("ipv4 / udp / vxlan / ipv4", "vxlan"),
            ("ipv4 / udp / eth", "udp"),
            ("ipv4 offset 1", "no fragments"),
            ("ipv4 / / udp", "a header is missing"),
            ("meta mark 1 / ipv4", "metadata"),
            ("udp / ipv4", "ipv4"),
            ("", "a header is missing"),
            ("ipv4 / udp src 70000", "does not fit the field"),
            ("ipv6 src ::/0 dst ::/0", "2^64 combinations"),
            ("arp / udp", "carries no layer 4"),
        ] {
            let found = Stack::parse(text).expect_err(text);
            assert!(found.contains(error), "{text}: {found}");
        }
    }
}
