//! Receive-side scaling: the hash of Toeplitz, bit after bit.

use wirepath_pmd::flow::{HashFields, Rss};

use crate::headers::{Fragment, Headers, Network, TunnelPorts};
use crate::reference::Fault;
use crate::rewrite::Frame;

/// For every bit of the input that is set, the 32 bits of the key that begin at the same place.
pub(crate) fn toeplitz(key: &[u8], input: &[u8]) -> u32 {
    let bit = |bytes: &[u8], n: usize| bytes.get(n / 8).is_some_and(|byte| byte >> (7 - n % 8) & 1 == 1);
    (0..input.len() * 8)
        .filter(|&n| bit(input, n))
        .fold(0, |hash, n| hash ^ (0..32).fold(0, |window, k| window << 1 | u32::from(bit(key, n + k))))
}

/// The queue of a packet: of the table's 512 entries, which the queues fill in turn, the one that the hash names. What has nothing to
/// hash goes to the first.
pub(crate) fn queue(rss: &Rss, key: &[u8], frame: &Frame, ports: &TunnelPorts, fault: Fault) -> u16 {
    let key = rss.key.as_ref().map_or(key, |key| &key[..]);
    let on = |bit: u8| rss.on.0 & bit != 0;
    // What comes out of a tunnel may be in disorder. Nothing of that is hashed, but checksums are left to whoever it is for.
    let ports = &TunnelPorts { checksums: ports.checksums && !frame.decapsulated, ..ports.clone() };
    let frame_was_inside = frame.decapsulated;
    let (headers, frame, level) = match frame.put_on.filter(|_| on(HashFields::INNER)) {
        None => (frame.headers(ports), frame.bytes.clone(), usize::from(on(HashFields::INNER))),
        // What went in.
        Some(put_on) => {
            let mut inside = match put_on.version {
                None => Vec::new(),
                Some(4) => [&[0; 12][..], &[0x08, 0x00]].concat(),
                Some(_) => [&[0; 12][..], &[0x86, 0xdd]].concat(),
            };
            inside.extend(&frame.bytes[put_on.length..]);
            (Headers::of(&inside, ports), inside, 0)
        }
    };
    let nothing_inside = level == 1 && frame_was_inside;
    let mut input = Vec::new();
    if let Some(stack) = headers.stacks.get(level).filter(|stack| !nothing_inside && stack.broken.is_none()) {
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
    fn published_hashes() {
        let key =
            crate::show::unhex("6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa")
                .unwrap();
        let ports = [0x0a, 0xea, 0x06, 0xe6];
        let v4 = [66, 9, 149, 187, 161, 142, 100, 80];
        assert_eq!(toeplitz(&key, &v4), 0x323e_8fc2);
        assert_eq!(toeplitz(&key, &[&v4[..], &ports].concat()), 0x51cc_c178);
    }
}
