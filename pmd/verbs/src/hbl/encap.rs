// UNSAFETY: calls libhbl.
#![allow(unsafe_code)]

//! Encapsulations of RDMA packets (hbldv_create_encap(3)).

use std::fmt;
use std::net::Ipv4Addr;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::hbldv::*;

use super::Port;
use crate::{Error, Result};

/// Most bytes of a tunnel header (kernel: hbl_encap.c).
pub const MAX_ENCAP_HEADER: usize = 32;

/// What carries the tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncapKind {
    /// No tunnel: only the source address of the packets is set.
    None,
    /// IPv4 with this protocol number.
    OverIpv4 {
        /// Such as 47 for GRE.
        protocol: u8,
    },
    /// UDP to this port.
    OverUdp {
        /// Such as 4789 for VXLAN. Receivers strip by it: peers use the same.
        destination_port: u16,
    },
}

/// What an encapsulation puts in front of packets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Encapsulation {
    source: Ipv4Addr,
    kind: EncapKind,
    header: Vec<u8>,
}

/// Why there is no such encapsulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncapProblem {
    /// Longer than what any of these NICs has room for.
    #[error("a tunnel header of {0} bytes; at most {MAX_ENCAP_HEADER} are possible")]
    Long(usize),
    /// The NIC stores whole words.
    #[error("a tunnel header of {0} bytes is not of whole 4-byte words")]
    Ragged(usize),
    /// Without a tunnel there is nothing to put.
    #[error("a tunnel header of {0} bytes without a tunnel")]
    Pointless(usize),
}

impl Encapsulation {
    /// Checks what the kernel checks for every NIC. A Gaudi 2 takes only [`EncapKind::OverUdp`] with exactly 32 bytes, and says
    /// `EOPNOTSUPP` to the rest.
    ///
    /// # Errors
    /// The header cannot be.
    pub fn new(source: Ipv4Addr, kind: EncapKind, header: &[u8]) -> std::result::Result<Self, EncapProblem> {
        match header.len() {
            bytes if bytes > MAX_ENCAP_HEADER => Err(EncapProblem::Long(bytes)),
            bytes if !bytes.is_multiple_of(4) => Err(EncapProblem::Ragged(bytes)),
            bytes if kind == EncapKind::None && bytes > 0 => Err(EncapProblem::Pointless(bytes)),
            _ => Ok(Self { source, kind, header: header.to_vec() }),
        }
    }

    /// Source address of the packets.
    pub fn source(&self) -> Ipv4Addr {
        self.source
    }

    /// What carries the header.
    pub fn kind(&self) -> EncapKind {
        self.kind
    }

    /// The tunnel header.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Bytes that each packet gets longer: the tunnel header, and UDP's where RDMA has its own behind it.
    pub fn overhead(&self) -> usize {
        const UDP: usize = 8;
        match self.kind {
            EncapKind::None => 0,
            EncapKind::OverIpv4 { .. } => self.header.len(),
            EncapKind::OverUdp { .. } => self.header.len() + UDP,
        }
    }
}

pub(super) struct EncapInner {
    raw: NonNull<hbldv_encap>,
    pub(super) port: Port,
    pub(super) id: u8,
    what: Encapsulation,
}

// SAFETY: libhbl changes nothing in it after its creation.
unsafe impl Send for EncapInner {}
// SAFETY: as above.
unsafe impl Sync for EncapInner {}

impl fmt::Debug for EncapInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encap").field("port", &self.port.number).field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for EncapInner {
    fn drop(&mut self) {
        let context = &self.port.hbl.context().inner;
        // The library frees its memory even if the kernel refuses: there is no second try.
        let result = self.port.hbl.library().and_then(|library| Ok(library.hbldv_destroy_encap()?)).map(|destroy| {
            // SAFETY: made by a creation, destroyed once; every queue pair that uses it kept it.
            unsafe { destroy(self.raw.as_ptr()) }
        });
        if let Err(error) = result.and_then(|result| context.done("hbldv_destroy_encap", result)) {
            tracing::error!("{error}");
        }
    }
}

/// An encapsulation of a port. Clones are the same one; it is destroyed with the last of them and of the queue pairs that use it.
#[derive(Clone, Debug)]
pub struct Encap(pub(super) Arc<EncapInner>);

impl Encap {
    /// The kernel's number of it. 0 is a number like any other.
    pub fn id(&self) -> u8 {
        self.0.id
    }

    /// What it puts in front of packets.
    pub fn encapsulation(&self) -> &Encapsulation {
        &self.0.what
    }
}

impl Port {
    /// Makes an encapsulation. Packets of other queue pairs that arrive with such a header have it taken off from now on, too.
    ///
    /// # Errors
    /// The port has no more ([`PortLimits::encaps`](super::PortLimits), `EBUSY`); the NIC has no such kind or size (`EOPNOTSUPP`).
    pub fn encap(&self, what: &Encapsulation) -> Result<Encap> {
        let library = self.hbl.library()?;
        let create = library.hbldv_create_encap()?;
        let destroy = library.hbldv_destroy_encap()?;
        let (encap_type, detail) = match what.kind {
            EncapKind::None => (HBLDV_ENCAP_TYPE_NO_ENC, 0),
            EncapKind::OverIpv4 { protocol } => (HBLDV_ENCAP_TYPE_ENC_OVER_IPV4, protocol.into()),
            EncapKind::OverUdp { destination_port } => (HBLDV_ENCAP_TYPE_ENC_OVER_UDP, destination_port),
        };
        let mut attr = hbldv_encap_attr {
            tnl_hdr_ptr: what.header.as_ptr().addr() as u64,
            tnl_hdr_size: what.header.len() as u32,
            // Numbers, not bytes on the wire: the kernel writes both into registers as they are.
            ipv4_addr: what.source.into(),
            port_num: self.number,
            udp_dst_port: detail,
            encap_type,
        };
        let inner = &self.hbl.context().inner;
        // SAFETY: an open context of libhbl; the kernel copies the header, which lives over the call.
        let raw = unsafe { create(inner.raw.as_ptr(), &raw mut attr) };
        let raw = inner.created("hbldv_create_encap", raw, u8::try_from(self.number).ok())?;
        // SAFETY: just made.
        let number = unsafe { raw.as_ref() }.encap_num;
        let Ok(id) = u8::try_from(number) else {
            // SAFETY: just made, and nobody has it.
            unsafe { destroy(raw.as_ptr()) };
            return Err(
                inner.nonsense("hbldv_create_encap", format!("encapsulation {number}, where queue pairs have 8 bits"))
            );
        };
        Ok(Encap(Arc::new(EncapInner { raw, port: self.clone(), id, what: what.clone() })))
    }

    pub(super) fn check_encap(&self, encap: &Encap) -> Result<()> {
        self.same("the encapsulation", &encap.0.port.hbl, encap.0.port.number).map_err(|error| match error {
            Error::Request(text) => Error::Request(format!("{text}; nothing below would notice")),
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_of_whole_words_and_short() {
        let udp = EncapKind::OverUdp { destination_port: 4789 };
        let make = |kind, bytes: usize| Encapsulation::new(Ipv4Addr::LOCALHOST, kind, &vec![1; bytes]);
        assert_eq!(make(udp, 32).unwrap().overhead(), 40);
        assert_eq!(make(EncapKind::OverIpv4 { protocol: 47 }, 8).unwrap().overhead(), 8);
        assert_eq!(make(EncapKind::None, 0).unwrap().overhead(), 0);
        assert_eq!(make(udp, 33), Err(EncapProblem::Long(33)));
        assert_eq!(make(udp, 30), Err(EncapProblem::Ragged(30)));
        assert_eq!(make(EncapKind::None, 4), Err(EncapProblem::Pointless(4)));
    }
}
