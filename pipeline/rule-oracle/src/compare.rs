//! Comparison of frames. Engines may choose the UDP source port and the IPv4 identification of outer headers
//! where the rule leaves them open. Everything else must be equal.

use std::fmt;

use crate::headers::u16_at;
use crate::rewrite::{Frame, pseudo, sum};

/// Difference between a frame and the expected one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Offset of the first differing byte.
    pub at: usize,
    /// Description of the difference.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: {}", self.at, self.what)
    }
}

/// Lowest source port for entropy (RFC 6335 section 6: dynamic ports).
pub const LEAST_ENTROPY: u16 = 49152;

fn differ<T>(at: usize, what: impl Into<String>) -> Result<T, Difference> {
    Err(Difference { at, what: what.into() })
}

/// Checks that `got` is equal to `expected`, except for the fields that an engine may choose.
pub fn same(expected: &Frame, got: &[u8]) -> Result<(), Difference> {
    if expected.bytes == got {
        return Ok(());
    }
    let mut want = expected.bytes.clone();
    let mut have = got.to_vec();
    if want.len() != have.len() {
        return differ(want.len().min(have.len()), format!("{} bytes, expected {}", have.len(), want.len()));
    }
    if let Some(outer_headers) = expected.outer_headers
        && let Some((version, ip)) = outer_headers.ip
    {
        if version == 4 && outer_headers.any_id {
            let header = usize::from(want[ip] & 15) * 4;
            if sum(&[&have[ip..ip + header]]) != 0xffff {
                return differ(ip + 10, "the outer IPv4 checksum is wrong");
            }
            // RFC 6864 section 4: any value is allowed.
            for frame in [&mut want, &mut have] {
                frame[ip + 4..ip + 6].fill(0);
                frame[ip + 10..ip + 12].fill(0);
            }
        }
        if let Some(udp) = outer_headers.udp.filter(|_| outer_headers.any_port) {
            let port = u16_at(&have, udp);
            if port < LEAST_ENTROPY {
                return differ(udp, format!("outer source port {port} is not a dynamic one"));
            }
            // The UDP checksum covers the port.
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
