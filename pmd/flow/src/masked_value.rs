//! Masked values, and the written form of each kind of value.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};

use wirepath_wire::MacAddr;

use super::Reason;

/// A value under a mask, compared with a field. Both are right-aligned: bit 0 is the last bit of the field.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MaskedValue {
    /// Value; 0 where the mask is 0.
    pub value: u128,
    /// Mask; 1 where the bits must be equal.
    pub mask: u128,
}

/// Returns a mask of the lowest `bits` bits.
pub const fn ones(bits: u8) -> u128 {
    if bits >= 128 { u128::MAX } else { (1 << bits) - 1 }
}

impl MaskedValue {
    /// Compares all `bits` bits of a field.
    pub const fn exact(value: u128, bits: u8) -> Self {
        Self { value, mask: ones(bits) }
    }

    /// Compares the first `length` bits of a field of `bits` bits. The other bits of `value` are dropped.
    pub const fn prefix(value: u128, length: u8, bits: u8) -> Self {
        let mask = ones(bits) & !ones(bits.saturating_sub(length));
        Self { value: value & mask, mask }
    }

    /// True if the value of a field matches.
    #[inline]
    pub const fn matches(self, value: u128) -> bool {
        value & self.mask == self.value
    }

    /// Returns the masked value for fields that match both; `None` if no value matches both.
    pub const fn and(self, other: Self) -> Option<Self> {
        if (self.value ^ other.value) & self.mask & other.mask != 0 {
            return None;
        }
        Some(Self { value: self.value | other.value, mask: self.mask | other.mask })
    }

    /// True if every value that matches `other` matches this too.
    pub const fn covers(self, other: Self) -> bool {
        self.mask & !other.mask == 0 && other.value & self.mask == self.value
    }
}

impl std::fmt::Debug for MaskedValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}/{:#x}", self.value, self.mask)
    }
}

/// Written form of the values of a field.
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
    /// Bit names joined by `+`, with `!` before bits that must be clear: `syn+!ack`.
    Flags(&'static [(&'static str, u128)]),
    /// Names of masked values.
    Choice(&'static [(&'static str, u128, u128)]),
}

/// Port names that rules may use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ports<'a>(pub &'a [(&'a str, wirepath_packet::PortId)]);

impl<'a> Ports<'a> {
    /// Returns the name of a port that rules can use for it. A name that reads as a number is none.
    pub fn name(&self, port: wirepath_packet::PortId) -> Option<&'a str> {
        // The names of a program are in the order of the numbers.
        let at = self.0.get(port.index()).filter(|(_, id)| *id == port);
        let (name, _) = at.or_else(|| self.0.iter().find(|(_, id)| *id == port))?;
        name.starts_with(|c: char| c.is_ascii_alphabetic()).then_some(*name)
    }
}

/// Error in a value. `in_mask` is true if it is in the word of the mask.
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
    /// Describes the written form, for error messages and documentation.
    pub fn expected(self, bits: u8) -> String {
        match self {
            Format::Mac => "an Ethernet address such as 02:00:00:00:00:01".to_owned(),
            Format::Ipv4 => "an IPv4 address or prefix such as 10.0.0.0/8".to_owned(),
            Format::Ipv6 => "an IPv6 address or prefix such as fd00::/8".to_owned(),
            Format::Number => format!("a number from 0 to {}", ones(bits)),
            Format::Hex => format!("a number from 0x0 to {:#x}", ones(bits)),
            Format::Port => "the name or number of a port".to_owned(),
            Format::Flags(names) => {
                format!(
                    "bit names joined by +, with ! before bits that must be clear: {}",
                    join(names.iter().map(|(name, _)| *name))
                )
            }
            Format::Choice(names) => format!("one of {}", join(names.iter().map(|(name, ..)| *name))),
        }
    }

    /// Parses a value of a field of `bits` bits, with the mask that its written form has. For programs that take such
    /// values outside rules.
    ///
    /// # Errors
    /// The wrong text, and what is expected.
    pub fn parse_value(self, bits: u8, text: &str) -> Result<MaskedValue, String> {
        self.parse(bits, text, None, Ports::default()).map_err(|error| error.message)
    }

    /// Parses a value and its mask. The mask is part of the value (`/8`, names) or a separate word.
    pub(super) fn parse(
        self,
        bits: u8,
        text: &str,
        mask: Option<&str>,
        ports: Ports<'_>,
    ) -> Result<MaskedValue, ValueError> {
        let (value, own) = self.value(bits, text, ports)?;
        let mask = match mask {
            None => own.unwrap_or(ones(bits)),
            Some(word) if own.is_some() => {
                let message = format!("\"{text}\" includes a mask already; remove \"mask {word}\"");
                return Err(ValueError { reason: Reason::Twice, message, in_mask: true });
            }
            Some(word) => match self.value(bits, word, Ports::default()) {
                Ok((mask, None)) => mask,
                Ok((_, Some(_))) => {
                    let message = format!("\"{word}\" is not a mask");
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
            let right = self.print(bits, MaskedValue { value: value & mask, mask });
            return bad(Reason::ValueOutsideMask, format!("\"{text}\" has bits outside its mask; write {right}"));
        }
        Ok(MaskedValue { value, mask })
    }

    /// Parses a value, and its mask if the written form includes one.
    fn value(self, bits: u8, text: &str, ports: Ports<'_>) -> Result<(u128, Option<u128>), ValueError> {
        let wrong = || bad(Reason::BadValue, format!("found \"{text}\", expected {}", self.expected(bits)));
        let address = |parse: &dyn Fn(&str) -> Option<u128>| {
            let Some((address, length)) = text.split_once('/') else {
                return parse(text).map_or_else(wrong, |value| Ok((value, None)));
            };
            let length = length.parse::<u8>().ok().filter(|&length| length <= bits);
            match (parse(address), length) {
                (Some(value), Some(length)) => Ok((value, Some(MaskedValue::prefix(0, length, bits).mask))),
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
                Some(&(_, id)) => Ok((id.number().into(), None)),
                None if text.starts_with(|c: char| c.is_ascii_digit()) => self.number(bits, text),
                None => {
                    let names: Vec<&str> = ports.0.iter().map(|(name, _)| *name).collect();
                    let near = wirepath_settings::nearest(text, &names);
                    let hint = match near {
                        Some(near) => format!("; did you mean \"{near}\"?"),
                        None if names.is_empty() => "; write its number".to_owned(),
                        None => format!("; the ports are {}", names.join(", ")),
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
        match wirepath_settings::nearest(text, names) {
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

    /// Formats a value and its mask. Parsing the text gives the same value and mask.
    pub fn print(self, bits: u8, MaskedValue { value, mask }: MaskedValue) -> String {
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
                if MaskedValue::prefix(0, length, bits).mask == mask {
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
    fn masks_in_every_format() {
        let read = |format: Format, bits, text: &str, mask: Option<&str>| {
            format.parse(bits, text, mask, Ports::default()).map_err(|e| (e.reason, e.in_mask))
        };
        assert_eq!(
            read(Format::Ipv4, 32, "10.0.0.0/8", None),
            Ok(MaskedValue { value: 0x0a00_0000, mask: 0xff00_0000 })
        );
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.1/8", None), Err((Reason::ValueOutsideMask, false)));
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.0/33", None), Err((Reason::BadValue, false)));
        assert_eq!(read(Format::Ipv6, 128, "::/0", None), Ok(MaskedValue { value: 0, mask: 0 }));
        assert_eq!(read(Format::Number, 12, "4096", None), Err((Reason::OutOfRange, false)));
        assert_eq!(read(Format::Number, 12, "+5", None), Err((Reason::BadValue, false)));
        assert_eq!(read(Format::Number, 12, "0x10", Some("0x1000")), Err((Reason::MaskOutsideField, true)));
        assert_eq!(read(Format::Number, 12, "0x10", Some("0x30")), Ok(MaskedValue { value: 16, mask: 48 }));
        assert_eq!(read(Format::Ipv4, 32, "10.0.0.0/8", Some("255.0.0.0")), Err((Reason::Twice, true)));
        const FLAGS: Format = Format::Flags(&[("a", 1), ("b", 2)]);
        assert_eq!(read(FLAGS, 3, "a+!b", None), Ok(MaskedValue { value: 1, mask: 3 }));
        assert_eq!(read(FLAGS, 3, "a+!a", None), Err((Reason::Twice, false)));
        assert_eq!(FLAGS.print(3, MaskedValue { value: 1, mask: 3 }), "a+!b");
        assert_eq!(FLAGS.print(3, MaskedValue { value: 1, mask: 7 }), "0x1");
        assert_eq!(Format::Hex.print(16, MaskedValue { value: 0x800, mask: 0xff00 }), "0x0800 mask 0xff00");
    }
}
