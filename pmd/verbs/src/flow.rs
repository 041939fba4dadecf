// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Receive rules (ibv_create_flow(3)): which frames of a port reach a queue pair.

use std::ptr::NonNull;

use rdma_core_sys::verbs::*;

use crate::{Result, RssQp};

/// Which frames a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlowMatch {
    /// Frames that fit all of these headers, the outermost first.
    Headers(Vec<FlowSpec>),
    /// Whatever no other rule wants.
    AllDefault,
    /// Group addresses that no other rule wants.
    MulticastDefault,
}

/// A header that a frame must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowSpec {
    /// Ethernet to a destination; only bits of the mask count.
    Ethernet {
        /// Destination address.
        destination: [u8; 6],
        /// Its bits that count.
        mask: [u8; 6],
    },
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl FlowSpec {
    /// Ethernet to any destination.
    pub const ANY: Self = Self::Ethernet { destination: [0; 6], mask: [0; 6] };
}

/// A rule that is in force until it is dropped. Keeps its queue pair.
#[derive(Debug)]
pub struct FlowRule {
    raw: NonNull<ibv_flow>,
    pair: RssQp,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for FlowRule {}
// SAFETY: as above.
unsafe impl Sync for FlowRule {}

impl Drop for FlowRule {
    fn drop(&mut self) {
        let context = &self.pair.0.domain.context.inner;
        // SAFETY: made by a creation, dropped once.
        let result = unsafe { ibv_destroy_flow(self.raw.as_ptr()) };
        context.destroyed("ibv_destroy_flow", Ok(result), || None);
    }
}

impl FlowRule {
    /// Frames of `port` (counted from 1) that fit go to `pair`, if no rule with a smaller `priority` has them. mlx5 knows priorities to 15
    /// (to 7 before Linux 5.7), and puts a rule for group addresses alone behind all others.
    ///
    /// # Errors
    /// The device refused: `CAP_NET_RAW` is missing, the headers cannot be matched, or the priority is too large.
    pub fn new(pair: &RssQp, port: u8, priority: u16, what: &FlowMatch) -> Result<Self> {
        let context = &pair.0.domain.context.inner;
        let mut words = encode(port, priority, what);
        // SAFETY: a living queue pair; a rule as ibv_create_flow(3) wants it, aligned to 8.
        let raw = unsafe { ibv_create_flow(pair.0.raw.as_ptr(), words.as_mut_ptr().cast()) };
        let raw = context.created("ibv_create_flow", raw, Some(port))?;
        Ok(Self { raw, pair: pair.clone() })
    }
}

/// Appends a C structure.
fn put<T: Copy>(bytes: &mut Vec<u8>, value: &T) {
    // SAFETY: structures of the table in rdma-core-sys, made from zeroed memory, so that padding is initialised as well.
    bytes.extend_from_slice(unsafe {
        std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>())
    });
}

/// The attribute with its specs behind it.
fn encode(port: u8, priority: u16, what: &FlowMatch) -> Vec<u64> {
    let (kind, specs) = match what {
        FlowMatch::Headers(specs) => (IBV_FLOW_ATTR_NORMAL, specs.as_slice()),
        FlowMatch::AllDefault => (IBV_FLOW_ATTR_ALL_DEFAULT, &[][..]),
        FlowMatch::MulticastDefault => (IBV_FLOW_ATTR_MC_DEFAULT, &[][..]),
    };
    let mut body = Vec::new();
    for spec in specs {
        match *spec {
            FlowSpec::Ethernet { destination, mask } => {
                let mut spec = ibv_flow_spec_eth::zeroed();
                (spec.type_, spec.size) = (IBV_FLOW_SPEC_ETH, size_of::<ibv_flow_spec_eth>() as u16);
                (spec.val.dst_mac, spec.mask.dst_mac) = (destination, mask);
                put(&mut body, &spec);
            }
            FlowSpec::Ipv4 => {
                let mut spec = ibv_flow_spec_ipv4::zeroed();
                (spec.type_, spec.size) = (IBV_FLOW_SPEC_IPV4, size_of::<ibv_flow_spec_ipv4>() as u16);
                put(&mut body, &spec);
            }
            FlowSpec::Ipv6 => {
                let mut spec = ibv_flow_spec_ipv6::zeroed();
                (spec.type_, spec.size) = (IBV_FLOW_SPEC_IPV6, size_of::<ibv_flow_spec_ipv6>() as u16);
                put(&mut body, &spec);
            }
            FlowSpec::Tcp | FlowSpec::Udp => {
                let kind = if *spec == FlowSpec::Tcp { IBV_FLOW_SPEC_TCP } else { IBV_FLOW_SPEC_UDP };
                let mut spec = ibv_flow_spec_tcp_udp::zeroed();
                (spec.type_, spec.size) = (kind, size_of::<ibv_flow_spec_tcp_udp>() as u16);
                put(&mut body, &spec);
            }
        }
    }
    let mut attr = ibv_flow_attr::zeroed();
    (attr.type_, attr.priority, attr.port, attr.num_of_specs) = (kind, priority, port, specs.len() as u8);
    attr.size = (size_of::<ibv_flow_attr>() + body.len()) as u16;
    let mut bytes = Vec::with_capacity(attr.size.into());
    put(&mut bytes, &attr);
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_an_attribute_with_specs_behind_it() {
        let rule = FlowMatch::Headers(vec![
            FlowSpec::Ethernet { destination: [2, 0, 0, 0, 0, 1], mask: [0xff; 6] },
            FlowSpec::Ipv6,
            FlowSpec::Udp,
        ]);
        let bytes: Vec<u8> = encode(2, 3, &rule).iter().flat_map(|word| word.to_ne_bytes()).collect();
        let half = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(
            (word(4), half(8), half(10), bytes[12], bytes[13]),
            (IBV_FLOW_ATTR_NORMAL, 20 + 40 + 88 + 16, 3, 3, 2)
        );
        assert_eq!((word(20), half(24), &bytes[26..32]), (IBV_FLOW_SPEC_ETH, 40, &[2, 0, 0, 0, 0, 1][..]));
        assert_eq!((word(60), half(64)), (IBV_FLOW_SPEC_IPV6, 88));
        assert_eq!((word(148), half(152)), (IBV_FLOW_SPEC_UDP, 16));
        assert_eq!(encode(1, 0, &FlowMatch::AllDefault)[0] >> 32, u64::from(IBV_FLOW_ATTR_ALL_DEFAULT));
    }
}
