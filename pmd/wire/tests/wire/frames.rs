//! Random valid frames, written byte by byte: neither the crate nor the reference parsers write what they
//! read.

#![allow(dead_code, unreachable_pub)]

use proptest::prelude::*;

/// Expected header offsets and values of a frame.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expect {
    pub l2: usize,
    pub tags: Vec<(u16, u16)>,
    pub ethertype: u16,
    pub l3: usize,
    pub l4: usize,
    pub payload: usize,
    pub end: usize,
    pub protocol: u8,
    pub first_fragment: bool,
    pub later_fragment: bool,
    pub vni: Option<u32>,
    pub inner: Option<Box<Expect>>,
}

#[derive(Clone, Debug)]
pub struct Frame {
    pub bytes: Vec<u8>,
    pub expect: Expect,
}

#[derive(Clone, Debug)]
pub enum L4Spec {
    Tcp { options: Vec<u8> },
    Udp,
    Icmp,
    Other,
    Vxlan(Box<Spec>, u32),
}

#[derive(Clone, Debug)]
pub enum L3Spec {
    V4 { options: Vec<u8>, fragment: Option<(u16, bool)>, ident: u16 },
    V6 { extensions: Vec<(u8, usize)>, fragment: Option<(u16, bool)> },
    Arp,
    Unknown(u16),
}

#[derive(Clone, Debug)]
pub struct Spec {
    pub macs: [u8; 12],
    pub tags: Vec<(u16, u16)>,
    pub l3: L3Spec,
    pub l4: L4Spec,
    pub payload: Vec<u8>,
    pub padding: usize,
    pub addresses: [u8; 32],
    pub ports: [u8; 4],
}

pub fn checksum(parts: &[&[u8]]) -> u16 {
    let bytes: Vec<u8> = parts.concat();
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Returns the layer-4 bytes, the start of their payload, the protocol number, and the tunnel payload.
fn l4(spec: &Spec, v6: bool) -> (Vec<u8>, usize, u8, Option<(u32, Expect)>) {
    match &spec.l4 {
        L4Spec::Tcp { options } => {
            let mut out = spec.ports.to_vec();
            out.extend([1, 2, 3, 4, 5, 6, 7, 8, (5 + options.len() / 4) as u8 * 16, 0x18, 9, 9, 0, 0, 0, 0]);
            out.extend(options);
            let at = out.len();
            out.extend(&spec.payload);
            (out, at, 6, None)
        }
        L4Spec::Udp => {
            let mut out = spec.ports.to_vec();
            // Any port but that of VXLAN.
            out[2] |= 0x80;
            out.extend(((8 + spec.payload.len()) as u16).to_be_bytes());
            out.extend([0, 0]);
            out.extend(&spec.payload);
            (out, 8, 17, None)
        }
        L4Spec::Icmp => {
            let mut out = vec![if v6 { 128 } else { 8 }, 0, 0, 0, 0, 1, 0, 2];
            out.extend(&spec.payload);
            (out, if v6 { 4 } else { 8 }, if v6 { 58 } else { 1 }, None)
        }
        L4Spec::Other => (spec.payload.clone(), 0, 132, None),
        L4Spec::Vxlan(inner, vni) => {
            let inner = inner.build();
            let mut out = vec![spec.ports[0], spec.ports[1], 0x12, 0xb5];
            out.extend(((16 + inner.bytes.len()) as u16).to_be_bytes());
            out.extend([0, 0, 8, 0, 0, 0]);
            out.extend((vni << 8).to_be_bytes());
            out.extend(inner.bytes);
            (out, 8, 17, Some((*vni, inner.expect)))
        }
    }
}

impl Expect {
    pub fn shift(&mut self, by: usize) {
        for at in [&mut self.l2, &mut self.l3, &mut self.l4, &mut self.payload, &mut self.end] {
            *at += by;
        }
        if let Some(inner) = &mut self.inner {
            inner.shift(by);
        }
    }
}

impl Spec {
    pub fn build(&self) -> Frame {
        let mut out = self.macs.to_vec();
        let mut e = Expect { tags: self.tags.clone(), ..Expect::default() };
        for (tpid, tci) in &self.tags {
            out.extend(tpid.to_be_bytes());
            out.extend(tci.to_be_bytes());
        }
        let mut tunnel = None;
        match &self.l3 {
            L3Spec::Unknown(ethertype) => {
                e.ethertype = *ethertype;
                out.extend(ethertype.to_be_bytes());
                e.l3 = out.len();
                e.l4 = e.l3;
                e.payload = e.l3;
                out.extend(&self.payload);
            }
            L3Spec::Arp => {
                e.ethertype = 0x806;
                out.extend([8, 6]);
                e.l3 = out.len();
                e.l4 = e.l3;
                e.payload = e.l3 + 28;
                out.extend([0, 1, 8, 0, 6, 4, 0, 1]);
                out.extend(&self.macs[6..]);
                out.extend(&self.addresses[..4]);
                out.extend([0; 6]);
                out.extend(&self.addresses[4..8]);
            }
            L3Spec::V4 { options, fragment, ident } => {
                e.ethertype = 0x800;
                out.extend([8, 0]);
                e.l3 = out.len();
                let (mut body, mut at, protocol, t) = l4(self, false);
                tunnel = t;
                e.protocol = protocol;
                let mut word = 0x4000u16;
                if let Some((units, more)) = fragment {
                    word = u16::from(*more) << 13 | units;
                    e.first_fragment = *units == 0 && *more;
                    e.later_fragment = *units != 0;
                    if *more {
                        body.resize(body.len().next_multiple_of(8), 0);
                    }
                }
                if e.later_fragment {
                    at = 0;
                }
                let mut h = vec![0x45 + (options.len() / 4) as u8, 0];
                h.extend(((20 + options.len() + body.len()) as u16).to_be_bytes());
                h.extend(ident.to_be_bytes());
                h.extend(word.to_be_bytes());
                h.extend([64, protocol, 0, 0]);
                h.extend(&self.addresses[..8]);
                h.extend(options);
                let c = checksum(&[&h]);
                h[10..12].copy_from_slice(&c.to_be_bytes());
                out.extend(h);
                e.l4 = out.len();
                e.payload = e.l4 + at;
                out.extend(body);
            }
            L3Spec::V6 { extensions, fragment } => {
                e.ethertype = 0x86dd;
                out.extend([0x86, 0xdd]);
                e.l3 = out.len();
                let (mut body, mut at, protocol, t) = l4(self, true);
                tunnel = t;
                let mut kinds: Vec<(u8, Vec<u8>)> = Vec::new();
                for (kind, units) in extensions {
                    // RFC 4302 section 2: AH has at least 12 bytes.
                    let units = if *kind == 51 { &(units + 1) } else { units };
                    let mut b = vec![0u8; if *kind == 51 { 8 + units * 4 } else { 8 + units * 8 }];
                    b[1] = *units as u8;
                    if *kind == 0 || *kind == 60 {
                        // One PadN option fills the header.
                        b[2] = 1;
                        b[3] = 4;
                        let rest = b.len() - 8;
                        if rest > 0 {
                            b[8] = 1;
                            b[9] = (rest - 2) as u8;
                        }
                    } else if *kind == 51 {
                        // RFC 4302: the length is in units of 4 bytes, minus 2.
                        b[1] = *units as u8;
                    }
                    kinds.push((*kind, b));
                }
                if let Some((units, more)) = fragment {
                    let word = units << 3 | u16::from(*more);
                    let [a, b] = word.to_be_bytes();
                    kinds.push((44, vec![0, 0, a, b, 1, 2, 3, 4]));
                    e.first_fragment = *units == 0 && *more;
                    e.later_fragment = *units != 0;
                    if *more {
                        body.resize(body.len().next_multiple_of(8), 0);
                    }
                }
                if e.later_fragment {
                    at = 0;
                }
                e.protocol = protocol;
                let next: Vec<u8> = kinds.iter().map(|k| k.0).chain([protocol]).collect();
                for (i, (_, b)) in kinds.iter_mut().enumerate() {
                    b[0] = next[i + 1];
                }
                let ext: Vec<u8> = kinds.into_iter().flat_map(|k| k.1).collect();
                out.extend([0x60, 0, 0, 0]);
                out.extend(((ext.len() + body.len()) as u16).to_be_bytes());
                out.extend([next[0], 64]);
                out.extend(&self.addresses);
                out.extend(ext);
                e.l4 = out.len();
                e.payload = e.l4 + at;
                out.extend(body);
            }
        }
        e.end = out.len();
        if let (false, false, Some((vni, mut inner))) = (e.first_fragment, e.later_fragment, tunnel) {
            inner.shift(e.l4 + 16);
            e.vni = Some(vni);
            e.inner = Some(Box::new(inner));
        }
        if e.protocol != 0 {
            out.resize(out.len() + self.padding, 0xa5);
        } else {
            e.end = out.len();
        }
        Frame { bytes: out, expect: e }
    }
}

fn tags() -> impl Strategy<Value = Vec<(u16, u16)>> {
    proptest::collection::vec((prop_oneof![Just(0x8100u16), Just(0x88a8)], any::<u16>()), 0..3)
}

fn words(max_words: usize, fill: u8) -> impl Strategy<Value = Vec<u8>> {
    (0..=max_words).prop_map(move |n| vec![fill; n * 4])
}

fn fragment() -> impl Strategy<Value = Option<(u16, bool)>> {
    prop_oneof![
        3 => Just(None),
        1 => Just(Some((0, true))),
        1 => (2u16..4000, any::<bool>()).prop_map(Some),
    ]
}

fn extensions() -> impl Strategy<Value = Vec<(u8, usize)>> {
    proptest::collection::vec((prop_oneof![Just(60u8), Just(43), Just(51)], 0usize..4), 0..4)
}

fn l3() -> impl Strategy<Value = L3Spec> {
    prop_oneof![
        4 => (words(10, 1), fragment(), any::<u16>())
            .prop_map(|(options, fragment, ident)| L3Spec::V4 { options, fragment, ident }),
        2 => any::<u16>().prop_map(|ident| L3Spec::V4 { options: vec![], fragment: None, ident }),
        4 => (any::<bool>(), extensions(), fragment())
            .prop_map(|(hop, mut extensions, fragment)| {
                if hop {
                    extensions.insert(0, (0, 1));
                }
                L3Spec::V6 { extensions, fragment }
            }),
        1 => Just(L3Spec::Arp),
        1 => prop_oneof![Just(0x88ccu16), Just(0x88b5), Just(0x0042)].prop_map(L3Spec::Unknown),
    ]
}

fn spec_with(l4: impl Strategy<Value = L4Spec>) -> impl Strategy<Value = Spec> {
    (
        any::<[u8; 12]>(),
        tags(),
        l3(),
        l4,
        proptest::collection::vec(any::<u8>(), 0..90),
        0usize..20,
        any::<[u8; 32]>(),
        any::<[u8; 4]>(),
    )
        .prop_map(|(macs, tags, l3, l4, payload, padding, addresses, ports)| Spec {
            macs,
            tags,
            l3,
            l4,
            payload,
            padding,
            addresses,
            ports,
        })
}

fn plain_l4() -> impl Strategy<Value = L4Spec> {
    prop_oneof![
        3 => words(10, 1).prop_map(|options| L4Spec::Tcp { options }),
        3 => Just(L4Spec::Udp),
        1 => Just(L4Spec::Icmp),
        1 => Just(L4Spec::Other),
    ]
}

/// A frame without a tunnel.
pub fn plain() -> impl Strategy<Value = Spec> {
    spec_with(plain_l4())
}

/// A frame with or without a tunnel.
pub fn any_spec() -> impl Strategy<Value = Spec> {
    let tunnel = (plain().boxed(), 0u32..1 << 24).prop_map(|(inner, vni)| L4Spec::Vxlan(Box::new(inner), vni));
    prop_oneof![1 => plain().boxed(), 1 => spec_with(tunnel).boxed()]
}
