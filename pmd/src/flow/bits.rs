//! Values under masks, and how each kind of value is written.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};

use wirepath_wire::MacAddr;

use super::Reason;

/// A value under a mask: what a field is compared with. Right-aligned, the field's last bit is bit 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bits {
    /// The value; 0 where the mask is 0.
    pub value: u128,
    /// 1 where the bit must be equal.
    pub mask: u128,
}

/// The lowest `bits` bits.
pub(super) const fn ones(bits: u8) -> u128 {
    if bits >= 128 { u128::MAX } else { (1 << bits) - 1 }
}

impl Bits {
    /// All `bits` bits of a field must be equal.
    pub const fn exact(value: u128, bits: u8) -> Self {
        Self { value, mask: ones(bits) }
    }

    /// The first `length` bits of a field of `bits` bits must be equal; the others of `value` are dropped.
    pub const fn prefix(value: u128, length: u8, bits: u8) -> Self {
        let mask = ones(bits) & !ones(bits.saturating_sub(length));
        Self { value: value & mask, mask }
    }

    /// Whether a field's value fits.
    #[inline]
    pub const fn matches(self, value: u128) -> bool {
        value & self.mask == self.value
    }

    /// What both demand; `None` if no value fits both.
    pub const fn and(self, other: Self) -> Option<Self> {
        if (self.value ^ other.value) & self.mask & other.mask != 0 {
            return None;
        }
        Some(Self { value: self.value | other.value, mask: self.mask | other.mask })
    }

    /// Whether every value that fits `other` fits this too.
    pub const fn covers(self, other: Self) -> bool {
        self.mask & !other.mask == 0 && other.value & self.mask == self.value
    }
}

impl std::fmt::Debug for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}/{:#x}", self.value, self.mask)
    }
}

/// How the values of a field are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `02:00:00:00:00:01`.
    Mac,
    /// `10.0.0.1`, `10.0.0.0/8`.
    Ipv4,
    /// `fd00::1`, `fd00::/8`.
    Ipv6,
    /// Decimal.
    Number,
    /// Hexadecimal, all digits of the field.
    Hex,
    /// A number, or the name of a port.
    Port,
    /// Names of bits joined by `+`, with `!` before those that must be clear: `syn+!ack`.
    Flags(&'static [(&'static str, u128)]),
    /// Names of values and their masks.
    Choice(&'static [(&'static str, u128, u128)]),
}

/// Names of ports, for the words of rules.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ports<'a>(pub &'a [(&'a str, crate::port::PortId)]);

/// What is wrong with a value; `in_mask` if the mask's word is at fault.
#[derive(Clone, Debug)]
pub(super) struct ValueError {
    pub(super) reason: Reason,
    pub(super) message: String,
    pub(super) in_mask: bool,
}

fn bad<T>(reason: Reason, message: String) -> Result<T, ValueError> {
    Err(ValueError { reason, message, in_mask: false })
}

impl Format {
    /// What values look like, for errors and documentation.
    pub fn expected(self, bits: u8) -> String {
        match self {
            Format::Mac => "an Ethernet address such as 02:00:00:00:00:01".to_owned(),
            Format::Ipv4 => "an IPv4 address or prefix such as 10.0.0.0/8".to_owned(),
            Format::Ipv6 => "an IPv6 address or prefix such as fd00::/8".to_owned(),
            Format::Number => format!("a number from 0 to {}", ones(bits)),
            Format::Hex => format!("a number from 0x0 to {:#x}", ones(bits)),
            Format::Port => "the name or number of a port".to_owned(),
            Format::Flags(names) => {
                format!("names joined by +, ! before what must be clear: {}", join(names.iter().map(|(name, _)| *name)))
            }
            Format::Choice(names) => format!("one of {}", join(names.iter().map(|(name, ..)| *name))),
        }
    }

    /// Reads a value and its mask, which may be part of the value (`/8`, names) or a word of its own.
    pub(super) fn parse(self, bits: u8, text: &str, mask: Option<&str>, ports: Ports<'_>) -> Result<Bits, ValueError> {
        let (value, own) = self.value(bits, text, ports)?;
        let mask = match mask {
            None => own.unwrap_or(ones(bits)),
            Some(word) if own.is_some() => {
                let message = format!("\"{text}\" has a mask of its own; \"mask {word}\" is one too many");
                return Err(ValueError { reason: Reason::Twice, message, in_mask: true });
            }
            Some(word) => match self.value(bits, word, Ports::default()) {
                Ok((mask, None)) => mask,
                Ok((_, Some(_))) => {
                    let message = format!("\"{word}\" cannot be a mask");
                    return Err(ValueError { reason: Reason::BadValue, message, in_mask: true });
                }
                Err(error) if error.reason == Reason::OutOfRange => {
                    let message = format!("mask {word} has bits outside the field of {bits} bits");
                    return Err(ValueError { reason: Reason::MaskOutsideField, message, in_mask: true });
                }
                Err(error) => return Err(ValueError { in_mask: true, ..error }),
            },
        };
        if value & !mask != 0 {
            let right = self.print(bits, Bits { value: value & mask, mask });
            return bad(Reason::ValueOutsideMask, format!("\"{text}\" has bits outside its mask; write {right}"));
        }
        Ok(Bits { value, mask })
    }

    /// A value, and its mask if the way it is written has one.
    fn value(self, bits: u8, text: &str, ports: Ports<'_>) -> Result<(u128, Option<u128>), ValueError> {
        let wrong = || bad(Reason::BadValue, format!("found \"{text}\", expected {}", self.expected(bits)));
        let address = |parse: &dyn Fn(&str) -> Option<u128>| {
            let Some((address, length)) = text.split_once('/') else {
                return parse(text).map_or_else(wrong, |value| Ok((value, None)));
            };
            let length = length.parse::<u8>().ok().filter(|&length| length <= bits);
            match (parse(address), length) {
                (Some(value), Some(length)) => Ok((value, Some(Bits::prefix(0, length, bits).mask))),
                _ => wrong(),
            }
        };
        match self {
            Format::Mac => match text.parse::<MacAddr>() {
                Ok(mac) => Ok((u128::from(mac.to_u64()), None)),
                Err(_) => wrong(),
            },
            Format::Ipv4 => address(&|t| t.parse::<Ipv4Addr>().ok().map(|a| u128::from(a.to_bits()))),
            Format::Ipv6 => address(&|t| t.parse::<Ipv6Addr>().ok().map(|a| a.to_bits())),
            Format::Port => match ports.0.iter().find(|(name, _)| *name == text) {
                Some(&(_, id)) => Ok((u128::from(id), None)),
                None if text.starts_with(|c: char| c.is_ascii_digit()) => self.number(bits, text),
                None => {
                    let names: Vec<&str> = ports.0.iter().map(|(name, _)| *name).collect();
                    let near = crate::settings::nearest(text, &names);
                    let hint = match near {
                        Some(near) => format!("; did you mean \"{near}\"?"),
                        None if names.is_empty() => "; write its number".to_owned(),
                        None => format!("; there are {}", names.join(", ")),
                    };
                    bad(Reason::UnknownPort, format!("no port is called \"{text}\"{hint}"))
                }
            },
            Format::Number | Format::Hex => self.number(bits, text),
            Format::Choice(names) => match names.iter().find(|(name, ..)| *name == text) {
                Some(&(_, value, mask)) => Ok((value, Some(mask))),
                None if text.starts_with(|c: char| c.is_ascii_digit()) => self.number(bits, text),
                None => self.unknown(bits, text, &names.iter().map(|(name, ..)| *name).collect::<Vec<_>>()),
            },
            Format::Flags(_) if text.starts_with(|c: char| c.is_ascii_digit()) => self.number(bits, text),
            Format::Flags(names) => {
                let (mut value, mut mask) = (0, 0);
                for word in text.split('+') {
                    let (name, set) = word.strip_prefix('!').map_or((word, true), |name| (name, false));
                    let Some(&(_, bit)) = names.iter().find(|(known, _)| *known == name) else {
                        return self.unknown(bits, name, &names.iter().map(|(name, _)| *name).collect::<Vec<_>>());
                    };
                    if mask & bit != 0 {
                        return bad(Reason::Twice, format!("\"{name}\" is named twice"));
                    }
                    mask |= bit;
                    value |= if set { bit } else { 0 };
                }
                Ok((value, Some(mask)))
            }
        }
    }

    fn unknown<T>(self, bits: u8, text: &str, names: &[&str]) -> Result<T, ValueError> {
        match crate::settings::nearest(text, names) {
            Some(near) => bad(Reason::UnknownWord, format!("found \"{text}\"; did you mean \"{near}\"?")),
            None => bad(Reason::UnknownWord, format!("found \"{text}\", expected {}", self.expected(bits))),
        }
    }

    fn number(self, bits: u8, text: &str) -> Result<(u128, Option<u128>), ValueError> {
        let read = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            Some(digits) if digits.bytes().all(|b| b.is_ascii_hexdigit()) => u128::from_str_radix(digits, 16),
            None if text.bytes().all(|b| b.is_ascii_digit()) => text.parse(),
            _ => return bad(Reason::BadValue, format!("found \"{text}\", expected {}", self.expected(bits))),
        };
        match read {
            Ok(value) if value <= ones(bits) => Ok((value, None)),
            _ => bad(
                Reason::OutOfRange,
                format!("{text} does not fit the field; expected a number from 0 to {}", ones(bits)),
            ),
        }
    }

    /// Writes a value and its mask so that it is read as the same.
    pub fn print(self, bits: u8, Bits { value, mask }: Bits) -> String {
        let full = mask == ones(bits);
        let one = |x: u128| match self {
            Format::Mac => MacAddr::from_u64(x as u64).to_string(),
            Format::Ipv4 => Ipv4Addr::from_bits(x as u32).to_string(),
            Format::Ipv6 => Ipv6Addr::from_bits(x).to_string(),
            Format::Number | Format::Port if full => x.to_string(),
            Format::Hex => format!("{x:#0width$x}", width = usize::from(bits).div_ceil(4) + 2),
            _ => format!("{x:#x}"),
        };
        match self {
            Format::Flags(names) => {
                let named = names.iter().filter(|(_, bit)| mask & bit != 0);
                let known = named.clone().fold(0, |all, (_, bit)| all | bit);
                if known == mask && mask != 0 {
                    let mut text = String::new();
                    for (i, (name, bit)) in named.enumerate() {
                        let join = if i == 0 { "" } else { "+" };
                        let not = if value & bit == 0 { "!" } else { "" };
                        let _ = write!(text, "{join}{not}{name}");
                    }
                    return text;
                }
            }
            Format::Choice(names) => {
                if let Some((name, ..)) = names.iter().find(|&&(_, v, m)| (v, m) == (value, mask)) {
                    return (*name).to_owned();
                }
            }
            Format::Ipv4 | Format::Ipv6 if !full => {
                let length = bits - (ones(bits) & !mask).count_ones() as u8;
                if Bits::prefix(0, length, bits).mask == mask {
                    return format!("{}/{length}", one(value));
                }
            }
            _ => {}
        }
        if full { one(value) } else { format!("{} mask {}", one(value), one(mask)) }
    }
}

pub(super) fn join<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_in_every_way_of_writing() {
        let read = |format: Format, bits, text: &str, mask: Option<&str>| {
            format.parse(bits, text, mask, Ports::default()).map_err(|e| (e.reason, e.in_mask))
        };
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.0/8", None), Ok(Bits { value: 0x0a00_0000, mask: 0xff00_0000 }));
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.1/8", None), Err((Reason::ValueOutsideMask, false)));
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.0/33", None), Err((Reason::BadValue, false)));
        assert_eq!(read(Format::Ipv6, 128, "::/0", None), Ok(Bits { value: 0, mask: 0 }));
        assert_eq!(read(Format::Number, 12, "4096", None), Err((Reason::OutOfRange, false)));
        assert_eq!(read(Format::Number, 12, "+5", None), Err((Reason::BadValue, false)));
        assert_eq!(read(Format::Number, 12, "0x10", Some("0x1000")), Err((Reason::MaskOutsideField, true)));
        assert_eq!(read(Format::Number, 12, "0x10", Some("0x30")), Ok(Bits { value: 16, mask: 48 }));
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.0/8", Some("255.0.0.0")), Err((Reason::Twice, true)));
        const FLAGS: Format = Format::Flags(&[("a", 1), ("b", 2)]);
        assert_eq!(read(FLAGS, 3, "a+!b", None), Ok(Bits { value: 1, mask: 3 }));
        assert_eq!(read(FLAGS, 3, "a+!a", None), Err((Reason::Twice, false)));
        assert_eq!(FLAGS.print(3, Bits { value: 1, mask: 3 }), "a+!b");
        assert_eq!(FLAGS.print(3, Bits { value: 1, mask: 7 }), "0x1");
        assert_eq!(Format::Hex.print(16, Bits { value: 0x800, mask: 0xff00 }), "0x0800 mask 0xff00");
    }
}
