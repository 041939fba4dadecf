//! Header modification: commands of 8 bytes that set a field, add to it or copy it.
//!
//! A command for a header that the packet does not have does nothing. The checksums of IPv4, TCP and UDP are
//! updated incrementally, so a wrong checksum stays wrong. Source of fields and layout: Linux
//! `include/linux/mlx5/mlx5_ifc.h`, DPDK `drivers/common/mlx5/mlx5_prm.h`.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5 as defs;

use super::headers::{self, Headers, Level, TCP, UDP};
use super::key::Registers;
use crate::frame;

/// Size of a command in bytes.
const COMMAND: usize = 8;

/// Location of a field of at most 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FieldLocation {
    /// Offset and length in the Ethernet header.
    Link(usize, u8),
    Ethertype,
    /// VLAN id of the first VLAN tag.
    Vid,
    Dscp,
    /// TTL of IPv4.
    Ttl,
    /// Hop limit of IPv6.
    HopLimit,
    V4(usize),
    V6(usize),
    /// Protocol, offset in its header, length in bytes.
    Transport(u8, usize, u8),
    TcpFlags,
    A,
    B,
    C(usize),
}

/// A field of the outer or inner headers, and its number of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    location: FieldLocation,
    inner: bool,
    bits: u32,
}

/// Each field exists for outer and inner headers; the numbers differ by `MODIFY_INNER`.
const FIRST_INNER: u32 = defs::MODIFY_INNER + defs::MODIFY_SRC_MAC_HIGH;
const LAST_INNER: u32 = defs::MODIFY_INNER + defs::MODIFY_DST_IPV4;
const PAST_REG_C: u32 = defs::MODIFY_REG_C0 + 8;
const PAST_TCP: u32 = defs::MODIFY_TCP_ACK + 2;

fn field(number: u32) -> Option<Field> {
    use FieldLocation::*;
    let (number, inner) = match number {
        defs::MODIFY_INNER_HOP_LIMIT => (defs::MODIFY_HOP_LIMIT, true),
        FIRST_INNER..=LAST_INNER => (number - defs::MODIFY_INNER, true),
        number => (number, false),
    };
    let (location, bits) = match number {
        defs::MODIFY_SRC_MAC_HIGH => (Link(6, 4), 32),
        defs::MODIFY_SRC_MAC_LOW => (Link(10, 2), 16),
        defs::MODIFY_ETHERTYPE => (Ethertype, 16),
        defs::MODIFY_DST_MAC_HIGH => (Link(0, 4), 32),
        defs::MODIFY_DST_MAC_LOW => (Link(4, 2), 16),
        defs::MODIFY_DSCP => (Dscp, 6),
        defs::MODIFY_TCP_FLAGS => (TcpFlags, 9),
        defs::MODIFY_TCP_SPORT => (Transport(TCP, 0, 2), 16),
        defs::MODIFY_TCP_DPORT => (Transport(TCP, 2, 2), 16),
        defs::MODIFY_TTL => (Ttl, 8),
        defs::MODIFY_UDP_SPORT => (Transport(UDP, 0, 2), 16),
        defs::MODIFY_UDP_DPORT => (Transport(UDP, 2, 2), 16),
        defs::MODIFY_SRC_IPV6..defs::MODIFY_DST_IPV6 => (V6(8 + 4 * (number - defs::MODIFY_SRC_IPV6) as usize), 32),
        defs::MODIFY_DST_IPV6..defs::MODIFY_SRC_IPV4 => (V6(24 + 4 * (number - defs::MODIFY_DST_IPV6) as usize), 32),
        defs::MODIFY_SRC_IPV4 => (V4(12), 32),
        defs::MODIFY_DST_IPV4 => (V4(16), 32),
        defs::MODIFY_FIRST_VID => (Vid, 12),
        defs::MODIFY_HOP_LIMIT => (HopLimit, 8),
        defs::MODIFY_REG_A => (A, 32),
        defs::MODIFY_REG_B => (B, 32),
        defs::MODIFY_REG_C0..PAST_REG_C => (C((number - defs::MODIFY_REG_C0) as usize), 32),
        // Each field is followed by the same field of the inner header.
        defs::MODIFY_TCP_SEQ..PAST_TCP => {
            let at = number - defs::MODIFY_TCP_SEQ;
            let location = Transport(TCP, if at < 2 { 4 } else { 8 }, 4);
            return Some(Field { location, inner: at % 2 == 1, bits: 32 });
        }
        _ => return None,
    };
    Some(Field { location, inner, bits })
}

/// A range of bits of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slice {
    field: Field,
    /// Offset of the lowest bit.
    offset: u32,
    length: u32,
}

impl Slice {
    fn mask(self) -> u32 {
        (u32::MAX >> (32 - self.length)) << self.offset
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    Set(Slice, u32),
    Add(Slice, u32),
    /// Copies to the first slice from the second one.
    Copy(Slice, Slice),
}

/// Commands that are executed in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Program {
    commands: Vec<Command>,
    /// Flow table that the program is for.
    pub(super) table: u8,
}

fn slice(number: u32, offset: u32, length: u32) -> Result<Slice, String> {
    let field = field(number).ok_or_else(|| format!("unknown field {number:#x}"))?;
    let length = if length == 0 { 32 } else { length };
    if offset + length > field.bits {
        return Err(format!("{length} bits at {offset} of field {number:#x}, which has {}", field.bits));
    }
    Ok(Slice { field, offset, length })
}

impl Program {
    /// Decodes commands of 8 bytes.
    pub(super) fn read(bytes: &[u8], table: u8) -> Result<Self, (Errno, String)> {
        let command = |bytes: &[u8; COMMAND]| {
            let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            let (first, second) = (defs::Modify(word(0)), word(4));
            Ok(match first.action() {
                defs::MODIFY_SET => Command::Set(slice(first.field(), first.offset(), first.length())?, second),
                defs::MODIFY_ADD => {
                    // The command applies to the whole field, whatever its length says.
                    let whole = field(first.field()).ok_or_else(|| format!("unknown field {:#x}", first.field()))?;
                    if first.offset() != 0 {
                        return Err("an addition must start at bit 0".to_owned());
                    }
                    Command::Add(Slice { field: whole, offset: 0, length: whole.bits }, second)
                }
                defs::MODIFY_COPY => {
                    let to = defs::Modify(second);
                    let to = slice(to.field(), to.offset(), first.length())?;
                    Command::Copy(to, slice(first.field(), first.offset(), first.length())?)
                }
                action => return Err(format!("unknown action {action}")),
            })
        };
        let commands: Result<Vec<_>, String> = bytes.as_chunks::<COMMAND>().0.iter().map(command).collect();
        match commands {
            Ok(commands) => Ok(Self { commands, table }),
            Err(why) => Err((Errno::INVAL, format!("header modification: {why}"))),
        }
    }

    /// Applies the commands to a packet; header offsets do not change.
    pub(super) fn apply(&self, packet: &mut [u8], registers: &mut Registers) {
        let headers = &headers::parse(packet);
        let levels = [Some(headers.outer), headers.inner];
        let before = levels.map(|level| level.map(|level| ChecksumUpdate::of(packet, &level)));
        for command in &self.commands {
            match *command {
                Command::Set(to, value) => write(packet, headers, registers, to, value),
                Command::Add(to, value) => {
                    if let Some(old) = load(packet, headers, registers, to.field) {
                        write(packet, headers, registers, to, old.wrapping_add(value));
                    }
                }
                Command::Copy(to, from) => {
                    if let Some(value) = load(packet, headers, registers, from.field) {
                        write(packet, headers, registers, to, value >> from.offset);
                    }
                }
            }
        }
        for (level, before) in levels.iter().zip(&before) {
            if let (Some(level), Some(before)) = (level, before) {
                before.apply(packet, level);
            }
        }
    }
}

/// Returns offset and length of a field in a packet.
fn locate(packet: &[u8], headers: &Headers, field: Field) -> Option<(usize, usize)> {
    let level = if field.inner { headers.inner.as_ref()? } else { &headers.outer };
    let ip = |version: u8, at: usize, count: usize| (level.version == version).then_some((level.l3 + at, count));
    let (at, count) = match field.location {
        FieldLocation::Link(at, count) => (level.l2? + at, usize::from(count)),
        FieldLocation::Ethertype => (level.ethertype?, 2),
        FieldLocation::Vid => (Some(level.l2? + 14).filter(|_| level.tags > 0)?, 2),
        FieldLocation::Dscp => match level.version {
            4 => (level.l3 + 1, 1),
            6 => (level.l3, 2),
            _ => return None,
        },
        FieldLocation::Ttl => ip(4, 8, 1)?,
        FieldLocation::HopLimit => ip(6, 7, 1)?,
        FieldLocation::V4(at) => ip(4, at, 4)?,
        FieldLocation::V6(at) => ip(6, at, 4)?,
        FieldLocation::Transport(protocol, at, count) => {
            Some((level.l4 + at, usize::from(count))).filter(|_| level.transport && level.protocol == protocol)?
        }
        FieldLocation::TcpFlags => Some((level.l4 + 12, 2)).filter(|_| level.transport && level.protocol == TCP)?,
        FieldLocation::A | FieldLocation::B | FieldLocation::C(_) => return None,
    };
    (at + count <= packet.len()).then_some((at, count))
}

/// Returns the number of bits below the field in its bytes.
fn shift(headers: &Headers, field: Field) -> u32 {
    let level = if field.inner { headers.inner.unwrap_or_default() } else { headers.outer };
    match (field.location, level.version) {
        // Two bits of ECN follow DSCP, and in IPv6 four more of the flow label.
        (FieldLocation::Dscp, 6) => 6,
        (FieldLocation::Dscp, _) => 2,
        _ => 0,
    }
}

fn load(packet: &[u8], headers: &Headers, registers: &Registers, field: Field) -> Option<u32> {
    let word = match field.location {
        FieldLocation::A => return Some(registers.a),
        FieldLocation::B => return Some(registers.b),
        FieldLocation::C(number) => return Some(registers.c[number]),
        _ => {
            let (at, count) = locate(packet, headers, field)?;
            let word = packet[at..at + count].iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte));
            word >> shift(headers, field)
        }
    };
    Some(word & u32::MAX >> (32 - field.bits))
}

fn write(packet: &mut [u8], headers: &Headers, registers: &mut Registers, to: Slice, value: u32) {
    let mask = to.mask();
    let value = value << to.offset & mask;
    let register = match to.field.location {
        FieldLocation::A => &mut registers.a,
        FieldLocation::B => &mut registers.b,
        FieldLocation::C(number) => &mut registers.c[number],
        _ => {
            let Some((at, count)) = locate(packet, headers, to.field) else { return };
            let up = shift(headers, to.field);
            let (value, mask) = (value << up, mask << up);
            for (i, byte) in packet[at..at + count].iter_mut().enumerate() {
                let down = 8 * (count - 1 - i);
                *byte = *byte & !(mask >> down) as u8 | (value >> down) as u8;
            }
            return;
        }
    };
    *register = *register & !mask | value;
}

/// Sums, before a modification, of the header bytes that checksums cover and that commands can change.
struct ChecksumUpdate {
    network: u64,
    transport: Option<(usize, u64)>,
}

impl ChecksumUpdate {
    fn of(packet: &[u8], level: &Level) -> Self {
        let addresses = match level.version {
            4 => frame::sum(&packet[level.l3 + 12..level.l3 + 20]),
            6 => frame::sum(&packet[level.l3 + 8..level.l3 + 40]),
            _ => 0,
        };
        let network = if level.version == 4 { frame::sum(&packet[level.l3..level.l3 + 10]) + addresses } else { 0 };
        let transport = level.transport.then_some(()).and_then(|()| {
            let (header, checksum) = match level.protocol {
                TCP => (20, 16),
                UDP => (8, 6),
                _ => return None,
            };
            let at = level.l4 + checksum;
            let sum = frame::sum(&packet[level.l4..at]) + frame::sum(&packet[at + 2..level.l4 + header]);
            Some((at, sum + addresses))
        });
        Self { network, transport }
    }

    /// Updates the checksums after a modification.
    fn apply(&self, packet: &mut [u8], level: &Level) {
        let now = Self::of(packet, level);
        if level.version == 4 && now.network != self.network {
            adjust(packet, level.l3 + 10, self.network, now.network);
        }
        if let (Some((at, before)), Some((_, after))) = (self.transport, now.transport)
            && before != after
        {
            let udp = level.protocol == UDP;
            // A UDP datagram without checksum keeps none.
            if !(udp && packet[at..at + 2] == [0, 0]) {
                adjust(packet, at, before, after);
                if udp && packet[at..at + 2] == [0, 0] {
                    packet[at..at + 2].fill(0xff);
                }
            }
        }
    }
}

/// Updates the checksum at `at` after the covered bytes changed from one sum to another (RFC 1624).
fn adjust(packet: &mut [u8], at: usize, before: u64, after: u64) {
    let old = u16::from_be_bytes([packet[at], packet[at + 1]]);
    let sum = u64::from(!old) + u64::from(!frame::fold(before)) + u64::from(frame::fold(after));
    packet[at..at + 2].copy_from_slice(&(!frame::fold(sum)).to_be_bytes());
}
