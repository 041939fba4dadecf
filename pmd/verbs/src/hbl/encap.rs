// UNSAFETY: calls libhbl.
#![allow(unsafe_code)]

//! Encapsulation of RDMA packets (hbldv_create_encap(3)).

use std::fmt;
use std::net::Ipv4Addr;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::hbldv::*;

use super::Port;
use crate::{Error, Result};

/// Maximum bytes of a tunnel header (kernel driver: hbl_encap.c).
pub const MAX_ENCAP_HEADER: usize = 32;

/// Protocol that carries the tunnel header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncapKind {
    /// No tunnel. Only the source address of the packets is set.
    None,
    /// IPv4 with this protocol number.
    OverIpv4 {
        /// Protocol number, such as 47 for GRE.
        protocol: u8,
    },
    /// UDP with this destination port.
    OverUdp {
        /// Port, such as 4789 for VXLAN. Receivers recognise tunnelled packets by it, so peers use the same port.
        destination_port: u16,
    },
}

/// Configuration of an encapsulation: the headers that it inserts before packets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EncapConfig {
    source: Ipv4Addr,
    kind: EncapKind,
    header: Vec<u8>,
}

/// Error of an encapsulation's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncapError {
    /// The header is longer than any of these NICs supports.
    #[error("a tunnel header of {0} bytes is too long; the maximum is {MAX_ENCAP_HEADER}")]
    TooLong(usize),
    /// The NIC stores whole words.
    #[error("a tunnel header of {0} bytes is not a multiple of 4 bytes")]
    Unaligned(usize),
    /// There is a header, but no tunnel to carry it.
    #[error("a tunnel header of {0} bytes is given without a tunnel")]
    HeaderWithoutTunnel(usize),
}

impl EncapConfig {
    /// Creates a configuration, and checks it as the kernel does for every NIC.
    ///
    /// A Gaudi 2 supports only [`EncapKind::OverUdp`] with exactly 32 bytes; [`Port::create_encap`] fails with
    /// `EOPNOTSUPP` otherwise.
    ///
    /// # Errors
    /// The header is not valid.
    pub fn new(source: Ipv4Addr, kind: EncapKind, header: &[u8]) -> std::result::Result<Self, EncapError> {
        match header.len() {
            bytes if bytes > MAX_ENCAP_HEADER => Err(EncapError::TooLong(bytes)),
            bytes if !bytes.is_multiple_of(4) => Err(EncapError::Unaligned(bytes)),
            bytes if kind == EncapKind::None && bytes > 0 => Err(EncapError::HeaderWithoutTunnel(bytes)),
            _ => Ok(Self { source, kind, header: header.to_vec() }),
        }
    }

    /// Returns the source address of the packets.
    pub fn source(&self) -> Ipv4Addr {
        self.source
    }

    /// Returns the protocol that carries the header.
    pub fn kind(&self) -> EncapKind {
        self.kind
    }

    /// Returns the tunnel header.
    pub fn header(&self) -> &[u8] {
        &self.header
    }

    /// Returns the bytes by which each packet grows: the tunnel header, and for UDP the outer UDP header.
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
    config: EncapConfig,
}

// SAFETY: `raw` is an owned pointer, and libhbl does not change the structure after its creation.
unsafe impl Send for EncapInner {}
// SAFETY: libhbl does not change the structure after its creation.
unsafe impl Sync for EncapInner {}

impl fmt::Debug for EncapInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encap").field("port", &self.port.number).field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for EncapInner {
    fn drop(&mut self) {
        let context = &self.port.hbl.context().inner;
        // The library frees its memory even if the kernel call fails, so the call cannot be repeated.
        let result = self.port.hbl.library().and_then(|library| Ok(library.hbldv_destroy_encap()?)).map(|destroy| {
            // SAFETY: the encapsulation is alive and is destroyed once. Queue pairs that use it keep it alive, so
            // none is left.
            unsafe { destroy(self.raw.as_ptr()) }
        });
        if let Err(error) = result.and_then(|result| context.check("hbldv_destroy_encap", result)) {
            tracing::error!("{error}");
        }
    }
}

/// Encapsulation of a port. Clones refer to the same object.
///
/// It is destroyed when the last clone and the last queue pair that uses it are dropped.
#[derive(Clone, Debug)]
pub struct Encap(pub(super) Arc<EncapInner>);

impl Encap {
    /// Returns the kernel's ID of the encapsulation. 0 is a valid ID.
    pub fn id(&self) -> u8 {
        self.0.id
    }

    /// Returns the configuration.
    pub fn config(&self) -> &EncapConfig {
        &self.0.config
    }
}

impl Port {
    /// Creates an encapsulation. From then on, the port removes this header from received packets of all queue pairs.
    ///
    /// # Errors
    /// The limit [`PortLimits::encaps`](super::PortLimits) is reached (`EBUSY`), or the NIC does not support the kind
    /// or the size (`EOPNOTSUPP`).
    pub fn create_encap(&self, config: &EncapConfig) -> Result<Encap> {
        let library = self.hbl.library()?;
        let create = library.hbldv_create_encap()?;
        let destroy = library.hbldv_destroy_encap()?;
        let (encap_type, detail) = match config.kind {
            EncapKind::None => (HBLDV_ENCAP_TYPE_NO_ENC, 0),
            EncapKind::OverIpv4 { protocol } => (HBLDV_ENCAP_TYPE_ENC_OVER_IPV4, protocol.into()),
            EncapKind::OverUdp { destination_port } => (HBLDV_ENCAP_TYPE_ENC_OVER_UDP, destination_port),
        };
        let mut attr = hbldv_encap_attr {
            tnl_hdr_ptr: config.header.as_ptr().addr() as u64,
            tnl_hdr_size: config.header.len() as u32,
            // These are in host byte order: the kernel writes both into registers unchanged.
            ipv4_addr: config.source.into(),
            port_num: self.number,
            udp_dst_port: detail,
            encap_type,
        };
        let inner = &self.hbl.context().inner;
        // SAFETY: the context is open and belongs to libhbl. The kernel copies the header during the call, while it
        // is alive.
        let raw = unsafe { create(inner.raw.as_ptr(), &raw mut attr) };
        let raw = inner.check_created("hbldv_create_encap", raw, u8::try_from(self.number).ok())?;
        // SAFETY: the encapsulation was created above and is alive.
        let number = unsafe { raw.as_ref() }.encap_num;
        let Ok(id) = u8::try_from(number) else {
            // SAFETY: the encapsulation was created above, is destroyed once, and no queue pair uses it.
            unsafe { destroy(raw.as_ptr()) };
            return Err(inner.invalid_answer(
                "hbldv_create_encap",
                format!("encapsulation {number}; queue pairs have 8 bits for it"),
            ));
        };
        Ok(Encap(Arc::new(EncapInner { raw, port: self.clone(), id, config: config.clone() })))
    }

    pub(super) fn check_encap(&self, encap: &Encap) -> Result<()> {
        self.check_same_port("the encapsulation", &encap.0.port.hbl, encap.0.port.number).map_err(|error| match error {
            Error::InvalidRequest(text) => Error::InvalidRequest(format!("{text}; the kernel does not check this")),
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tunnel_header_length_is_checked() {
        let udp = EncapKind::OverUdp { destination_port: 4789 };
        let make = |kind, bytes: usize| EncapConfig::new(Ipv4Addr::LOCALHOST, kind, &vec![1; bytes]);
        assert_eq!(make(udp, 32).unwrap().overhead(), 40);
        assert_eq!(make(EncapKind::OverIpv4 { protocol: 47 }, 8).unwrap().overhead(), 8);
        assert_eq!(make(EncapKind::None, 0).unwrap().overhead(), 0);
        assert_eq!(make(udp, 33), Err(EncapError::TooLong(33)));
        assert_eq!(make(udp, 30), Err(EncapError::Unaligned(30)));
        assert_eq!(make(EncapKind::None, 4), Err(EncapError::HeaderWithoutTunnel(4)));
    }
}
