//! Simple matches for frames that the kernel keeps. They are compiled into the XDP program.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// Match for frames that are passed to the kernel. All conditions that are set must hold. Frames with a VLAN
/// tag never match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelMatch {
    /// EtherType.
    pub ethertype: Option<u16>,
    /// IPv4 protocol or IPv6 next header. Extension headers are not skipped.
    pub protocol: Option<u8>,
    /// TCP or UDP destination port. It needs `protocol`, and later fragments do not match.
    pub destination_port: Option<u16>,
    /// IP destination.
    pub destination: Option<IpAddr>,
}

/// Syntax that [`KernelMatch::from_str`] accepts.
pub(super) const EXPECTED: &str = "\"nothing\", or matches made of the words arp, lldp, ipv4, ipv6, icmp, icmpv6, \
     tcp, udp, ethertype N, protocol N, port N (after tcp or udp), to ADDRESS";

const TCP: u8 = 6;
const UDP: u8 = 17;

impl FromStr for KernelMatch {
    type Err = ();

    /// Parses words in any order: `"arp"`, `"tcp port 22 to 192.0.2.1"`, `"ethertype 0x88cc"`.
    fn from_str(text: &str) -> Result<Self, ()> {
        fn once<T: PartialEq>(slot: &mut Option<T>, value: T) -> Result<(), ()> {
            if slot.as_ref().is_some_and(|old| *old != value) {
                return Err(());
            }
            *slot = Some(value);
            Ok(())
        }
        fn number(word: Option<&str>) -> Result<u16, ()> {
            let word = word.ok_or(())?;
            match word.strip_prefix("0x") {
                Some(hex) => u16::from_str_radix(hex, 16),
                None => word.parse(),
            }
            .map_err(drop)
        }
        let mut it = Self::default();
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            match word {
                "arp" => once(&mut it.ethertype, 0x0806)?,
                "lldp" => once(&mut it.ethertype, 0x88cc)?,
                "ipv4" => once(&mut it.ethertype, 0x0800)?,
                "ipv6" => once(&mut it.ethertype, 0x86dd)?,
                "icmp" => (once(&mut it.ethertype, 0x0800)?, once(&mut it.protocol, 1)?).0,
                "icmpv6" => (once(&mut it.ethertype, 0x86dd)?, once(&mut it.protocol, 58)?).0,
                "tcp" => once(&mut it.protocol, TCP)?,
                "udp" => once(&mut it.protocol, UDP)?,
                "ethertype" => once(&mut it.ethertype, number(words.next())?)?,
                "protocol" => once(&mut it.protocol, number(words.next())?.try_into().map_err(drop)?)?,
                "port" => once(&mut it.destination_port, number(words.next())?)?,
                "to" => once(&mut it.destination, words.next().ok_or(())?.parse().map_err(drop)?)?,
                _ => return Err(()),
            }
        }
        let is_ip = matches!(it.ethertype, None | Some(0x0800 | 0x86dd));
        let family_fits = match (it.destination, it.ethertype) {
            (Some(IpAddr::V4(_)), Some(0x86dd)) | (Some(IpAddr::V6(_)), Some(0x0800)) => false,
            _ => is_ip || (it.protocol.is_none() && it.destination.is_none()),
        };
        let port_fits = it.destination_port.is_none() || matches!(it.protocol, Some(TCP | UDP));
        if it == Self::default() || !family_fits || !port_fits { Err(()) } else { Ok(it) }
    }
}

impl fmt::Display for KernelMatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words = Vec::new();
        words.extend(self.ethertype.map(|v| format!("ethertype {v:#06x}")));
        words.extend(self.protocol.map(|v| format!("protocol {v}")));
        words.extend(self.destination_port.map(|v| format!("port {v}")));
        words.extend(self.destination.map(|v| format!("to {v}")));
        f.write_str(&words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_conditions() {
        let it: KernelMatch = "tcp port 22 to 192.0.2.1".parse().unwrap();
        assert_eq!((it.protocol, it.destination_port), (Some(6), Some(22)));
        assert_eq!(it.to_string(), "protocol 6 port 22 to 192.0.2.1");
        assert_eq!("ethertype 0x88cc".parse::<KernelMatch>(), "lldp".parse());
        assert_eq!(it.to_string().parse(), Ok(it));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "port 22",
            "icmp port 1",
            "arp to 192.0.2.1",
            "ipv6 to 192.0.2.1",
            "arp ipv4",
            "ethertype 99999",
            "to here",
        ] {
            assert_eq!(text.parse::<KernelMatch>(), Err(()), "{text}");
        }
    }
}
