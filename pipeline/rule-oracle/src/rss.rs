//! Receive-side scaling: the Toeplitz hash, bit by bit.

use wirepath_flow::{HashFields, Rss};

use crate::headers::{Fragment, Headers, Network, TunnelPorts};
use crate::reference::Fault;
use crate::rewrite::Frame;

/// Returns the Toeplitz hash: for every set bit of the input, the 32 bits of the key at the same offset are
/// XORed.
pub(crate) fn toeplitz(key: &[u8], input: &[u8]) -> u32 {
    let bit = |bytes: &[u8], n: usize| bytes.get(n / 8).is_some_and(|byte| byte >> (7 - n % 8) & 1 == 1);
    (0..input.len() * 8)
        .filter(|&n| bit(input, n))
        .fold(0, |hash, n| hash ^ (0..32).fold(0, |window, k| window << 1 | u32::from(bit(key, n + k))))
}

/// Returns the queue of a packet. The hash selects one of 512 table entries, which the queues fill in turn. A
/// packet without hash input goes to the first queue.
pub(crate) fn queue(rss: &Rss, key: &[u8], frame: &Frame, ports: &TunnelPorts, fault: Fault) -> u16 {
    let key = rss.key.as_ref().map_or(key, |key| &key[..]);
    let on = |bit: u8| rss.on.0 & bit != 0;
    // The headers of a decapsulated packet may be malformed, and then they are not hashed. IP header
    // checksums are left to the destination.
    let ports = &TunnelPorts { checksums: ports.checksums && !frame.decapsulated, ..ports.clone() };
    let frame_was_inside = frame.decapsulated;
    let (headers, frame, level) = match frame.outer_headers.filter(|_| on(HashFields::INNER)) {
        None => (frame.headers(ports), frame.bytes.clone(), usize::from(on(HashFields::INNER))),
        // The packet before encapsulation.
        Some(outer_headers) => {
            let mut inside = match outer_headers.version {
                None => Vec::new(),
                Some(4) => [&[0; 12][..], &[0x08, 0x00]].concat(),
                Some(_) => [&[0; 12][..], &[0x86, 0xdd]].concat(),
            };
            inside.extend(&frame.bytes[outer_headers.length..]);
            (Headers::of(&inside, ports), inside, 0)
        }
    };
    let nothing_inside = level == 1 && frame_was_inside;
    let mut input = Vec::new();
    if let Some(stack) = headers.stacks.get(level).filter(|stack| !nothing_inside && stack.malformed.is_none()) {
        let addresses = match stack.network {
            Network::Ipv4(at) => Some((at + 12, 4)),
            Network::Ipv6(at) => Some((at + 8, 16)),
            _ => None,
        };
        if let Some((at, length)) = addresses {
            if on(HashFields::SRC) {
                input.extend(&frame[at..at + length]);
            }
            if on(HashFields::DST) {
                input.extend(&frame[at + length..at + 2 * length]);
            }
        }
        match stack.transport.filter(|_| stack.fragment == Fragment::No && fault != Fault::RssForgetsThePorts) {
            Some((6 | 17, at)) => {
                if on(HashFields::SRC_PORT) {
                    input.extend(&frame[at..at + 2]);
                }
                if on(HashFields::DST_PORT) {
                    input.extend(&frame[at + 2..at + 4]);
                }
            }
            Some((50, at)) if on(HashFields::SPI) => input.extend(&frame[at..at + 4]),
            _ => {}
        }
    }
    if input.is_empty() {
        return rss.queues[0];
    }
    rss.queues[toeplitz(key, &input) as usize % 512 % rss.queues.len()]
}

#[cfg(test)]
mod tests {
    use super::toeplitz;

    /// Microsoft, "Verifying the RSS hash calculation": the first rows for IPv4 and IPv6.
    #[test]
    fn published_rss_hashes() {
        let key =
            crate::show::unhex("6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa")
                .unwrap();
        let ports = [0x0a, 0xea, 0x06, 0xe6];
        let v4 = [66, 9, 149, 187, 161, 142, 100, 80];
        assert_eq!(toeplitz(&key, &v4), 0x323e_8fc2);
        assert_eq!(toeplitz(&key, &[&v4[..], &ports].concat()), 0x51cc_c178);
    }
}
