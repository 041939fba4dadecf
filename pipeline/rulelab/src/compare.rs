//! Equality on the wire. Two engines may choose the UDP source port and the IPv4 identification of headers that they put on, where
//! the rule leaves them open; everything else must be the same.

use std::fmt;

use crate::headers::u16_at;
use crate::rewrite::{Frame, pseudo, sum};

/// How a frame differs from what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// First byte at fault.
    pub at: usize,
    /// What is wrong there.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: {}", self.at, self.what)
    }
}

/// Least source port that entropy may give (RFC 6335 section 6: dynamic ports).
pub const LEAST_ENTROPY: u16 = 49152;

fn differ<T>(at: usize, what: impl Into<String>) -> Result<T, Difference> {
    Err(Difference { at, what: what.into() })
}

/// Whether `got` is what `expected` says.
pub fn same(expected: &Frame, got: &[u8]) -> Result<(), Difference> {
    if expected.bytes == got {
        return Ok(());
    }
    let mut want = expected.bytes.clone();
    let mut have = got.to_vec();
    if want.len() != have.len() {
        return differ(want.len().min(have.len()), format!("{} bytes, expected {}", have.len(), want.len()));
    }
    if let Some(put_on) = expected.put_on
        && let Some((version, ip)) = put_on.ip
    {
        if version == 4 && put_on.any_id {
            let header = usize::from(want[ip] & 15) * 4;
            if sum(&[&have[ip..ip + header]]) != 0xffff {
                return differ(ip + 10, "the outer IPv4 checksum is wrong");
            }
            // RFC 6864 section 4: any value.
            for frame in [&mut want, &mut have] {
                frame[ip + 4..ip + 6].fill(0);
                frame[ip + 10..ip + 12].fill(0);
            }
        }
        if let Some(udp) = put_on.udp.filter(|_| put_on.any_port) {
            let port = u16_at(&have, udp);
            if port < LEAST_ENTROPY {
                return differ(udp, format!("outer source port {port} is not a dynamic one"));
            }
            // Its checksum covers the port.
            let (checksum, wanted) = (u16_at(&have, udp + 6), u16_at(&want, udp + 6));
            let right = sum(&[&pseudo(&have, version, ip, 17, have.len() - udp), &have[udp..]]) == 0xffff;
            if if wanted == 0 { checksum != 0 } else { checksum == 0 || !right } {
                return differ(udp + 6, "the outer UDP checksum is wrong");
            }
            for frame in [&mut want, &mut have] {
                frame[udp..udp + 2].fill(0);
                frame[udp + 6..udp + 8].fill(0);
            }
        }
    }
    let length = have.len();
    for &at in expected.zeros.iter().filter(|at| **at + 2 <= length) {
        for frame in [&mut want, &mut have] {
            if u16_at(frame, at) == 0xffff {
                frame[at..at + 2].fill(0);
            }
        }
    }
    match want.iter().zip(&have).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => differ(at, format!("{:#04x}, expected {:#04x}", have[at], want[at])),
    }
}
