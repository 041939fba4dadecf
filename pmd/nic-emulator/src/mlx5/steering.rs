//! Receive rules of `ibv_create_flow`: which queue pair a frame goes to.
//!
//! Source for checks and order: Linux `drivers/infiniband/core/uverbs_cmd.c`, `drivers/infiniband/hw/mlx5/fs.c`.

use rustix::io::Errno;

use super::{Mlx5, Qp};
use crate::device::{Call, ObjectId};
use crate::frame::{Layers, Network, TCP, UDP};
use crate::host::Host;
use crate::tunnel;

const NORMAL: u32 = 0;
const ALL_DEFAULT: u32 = 1;
const MC_DEFAULT: u32 = 2;
const DONT_TRAP: u32 = 1 << 1;
const EGRESS: u32 = 1 << 2;
const INNER: u32 = 0x100;
const ETH: u32 = 0x20;
const IPV4: u32 = 0x30;
const IPV6: u32 = 0x31;
const SPEC_TCP: u32 = 0x40;
const SPEC_UDP: u32 = 0x41;
const VXLAN: u32 = 0x50;
const TAG: u32 = 0x1000;
const DROP: u32 = 0x1001;
/// Least important priority.
const MOST_PRIORITY: u16 = 15;

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It goes to this queue pair, with this tag.
    Queue { qp: ObjectId, tag: u32 },
    /// A rule drops it.
    Drop,
    /// No rule has it.
    Miss,
}

/// A rule.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) port: usize,
    /// Rules with the smallest go first: class, priority, then the more specific, then the older.
    order: (u8, u16, u32, u64),
    checks: Vec<Check>,
    verdict: Verdict,
}

/// A comparison of bytes of a header.
#[derive(Debug)]
struct Check {
    what: What,
    inner: bool,
    value: Vec<u8>,
    mask: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// Addresses, EtherType, tag.
    Eth,
    V4,
    V6,
    Ports(u8),
    Vni,
    /// Any group address.
    Group,
}

impl Check {
    fn fits(&self, frame: &[u8], layers: &Layers) -> bool {
        let inner = if self.inner { tunnel::inner(frame, layers) } else { None };
        let (start, layers) = match (self.inner, inner) {
            (true, None) => return false,
            (true, Some((start, inner))) => (start, inner),
            (false, _) => (0, *layers),
        };
        let bytes = &frame[start..];
        let mut seen = [0u8; 40];
        let length = self.value.len();
        match self.what {
            What::Group => return bytes[0] & 1 == 1,
            What::Eth => {
                seen[..12].copy_from_slice(&bytes[..12]);
                let at = layers.l3.saturating_sub(2).max(12);
                seen[12..14].copy_from_slice(&bytes[at..at + 2]);
                let wants_tag = self.mask[14] | self.mask[15] != 0;
                match layers.vlan {
                    Some(tag) => seen[14..16].copy_from_slice(&tag.to_be_bytes()),
                    None if wants_tag => return false,
                    None => {}
                }
            }
            What::V4 => {
                if layers.network != Some(Network::V4) {
                    return false;
                }
                let header = &bytes[layers.l3..layers.l3 + 20];
                seen[..8].copy_from_slice(&header[12..20]);
                seen[8] = header[9];
                seen[9] = header[1];
                seen[10] = header[8];
                seen[11] = header[6] >> 5;
            }
            What::V6 => {
                if layers.network != Some(Network::V6) {
                    return false;
                }
                let header = &bytes[layers.l3..layers.l3 + 40];
                seen[..32].copy_from_slice(&header[8..40]);
                let first = u32::from_be_bytes(header[..4].try_into().expect("four bytes"));
                seen[32..36].copy_from_slice(&(first & 0xf_ffff).to_be_bytes());
                seen[36] = if layers.protocol != 0 { layers.protocol } else { header[6] };
                seen[37] = (first >> 20) as u8;
                seen[38] = header[7];
            }
            What::Ports(protocol) => {
                if layers.protocol != protocol {
                    return false;
                }
                // The destination comes first.
                seen[..2].copy_from_slice(&bytes[layers.l4 + 2..layers.l4 + 4]);
                seen[2..4].copy_from_slice(&bytes[layers.l4..layers.l4 + 2]);
            }
            What::Vni => {
                if layers.protocol != UDP || bytes.len() < layers.l4 + 16 {
                    return false;
                }
                seen[1..4].copy_from_slice(&bytes[layers.l4 + 12..layers.l4 + 15]);
            }
        }
        seen[..length].iter().zip(&self.value).zip(&self.mask).all(|((seen, value), mask)| (seen ^ value) & mask == 0)
    }
}

impl<H: Host> Mlx5<H> {
    /// Asks the rules of a port.
    pub(super) fn steer(&self, port: usize, frame: &[u8], layers: &Layers) -> Verdict {
        for id in &self.ports[port].rules {
            if let Some(flow) = self.flows.get(*id)
                && flow.checks.iter().all(|check| check.fits(frame, layers))
            {
                return flow.verdict;
            }
        }
        Verdict::Miss
    }

    pub(super) fn add_flow(
        &mut self,
        call: &mut Call<'_, H>,
        qp: ObjectId,
        attribute: &[u8; 16],
        specs: &[u8],
    ) -> Result<ObjectId, Errno> {
        let name = self.spec.name.clone();
        let word = |at: usize| u32::from_ne_bytes(attribute[at..at + 4].try_into().expect("four bytes"));
        let half = |at: usize| u16::from_ne_bytes([attribute[at], attribute[at + 1]]);
        let (kind, priority, count, port, flags) = (word(0), half(6), attribute[8], attribute[11], word(12));
        let refuse = |errno, why: String| Err(call.refuse(errno, format_args!("{name}: rule: {why}")));
        let Some(port) = usize::from(port).checked_sub(1).filter(|at| *at < self.ports.len()) else {
            return refuse(Errno::INVAL, format!("port {port}"));
        };
        if !matches!(self.qps.get(qp), Some(Qp::Rss(_))) {
            return refuse(Errno::INVAL, "the queue pair receives nothing".to_owned());
        }
        if flags & !(DONT_TRAP | EGRESS) != 0 || count > 10 {
            return refuse(Errno::INVAL, format!("flags {flags:#x}, {count} specs"));
        }
        if flags != 0 {
            return refuse(Errno::OPNOTSUPP, format!("flags {flags:#x} are not emulated"));
        }
        if priority > MOST_PRIORITY {
            return refuse(Errno::NOMEM, format!("priority {priority}; at most {MOST_PRIORITY}"));
        }
        let (mut checks, action) = match kind {
            NORMAL => match read(specs, count) {
                Ok(read) => read,
                Err((errno, why)) => return refuse(errno, why),
            },
            ALL_DEFAULT | MC_DEFAULT if specs.is_empty() => (Vec::new(), Action::default()),
            ALL_DEFAULT | MC_DEFAULT => return refuse(Errno::INVAL, "a default rule with specs".to_owned()),
            kind => return refuse(Errno::OPNOTSUPP, format!("type {kind}")),
        };
        // A rule for group addresses only comes behind all priorities, and the defaults behind that.
        let group = checks
            .first()
            .is_some_and(|check: &Check| check.what == What::Eth && check.value[0] & 1 == 1 && check.mask[0] & 1 == 1);
        let class = match kind {
            NORMAL if !group => 0,
            NORMAL => 1,
            MC_DEFAULT => 2,
            _ => 3,
        };
        if kind == MC_DEFAULT {
            checks.push(Check { what: What::Group, inner: false, value: Vec::new(), mask: Vec::new() });
        }
        let bits: u32 = checks.iter().flat_map(|check| &check.mask).map(|byte| byte.count_ones()).sum();
        self.next_flow += 1;
        let order =
            (class, if class == 0 { priority } else { 0 }, u32::MAX - bits - checks.len() as u32, self.next_flow);
        let verdict = if action.drop { Verdict::Drop } else { Verdict::Queue { qp, tag: action.tag } };
        let id = self.flows.add(Flow { port, order, checks, verdict });
        let rules = &mut self.ports[port].rules;
        let at = rules.partition_point(|other| self.flows.get(*other).is_some_and(|other| other.order < order));
        rules.insert(at, id);
        Ok(id)
    }

    pub(super) fn remove_flow(&mut self, id: ObjectId) {
        if let Some(flow) = self.flows.remove(id) {
            self.ports[flow.port].rules.retain(|other| *other != id);
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Action {
    tag: u32,
    drop: bool,
}

/// Specs as the kernel has them: a head of 8 bytes, value, mask.
fn read(mut specs: &[u8], count: u8) -> Result<(Vec<Check>, Action), (Errno, String)> {
    let invalid = |why: String| Err((Errno::INVAL, why));
    let mut checks: Vec<Check> = Vec::new();
    let mut action = Action::default();
    for _ in 0..count {
        let Some(head) = specs.first_chunk::<8>() else { return invalid("a spec is cut off".to_owned()) };
        let kind = u32::from_ne_bytes(head[..4].try_into().expect("four bytes"));
        let size = usize::from(u16::from_ne_bytes([head[4], head[5]]));
        if size < 8 || size > specs.len() || head[6..8] != [0, 0] {
            return invalid(format!("spec {kind:#x} of {size} bytes"));
        }
        let (spec, rest) = specs.split_at(size);
        specs = rest;
        let body = &spec[8..];
        let (plain, inner) = (kind & !INNER, kind & INNER != 0 && kind < TAG);
        let (what, least) = match plain {
            ETH => (What::Eth, 16),
            IPV4 => (What::V4, 8),
            IPV6 => (What::V6, 39),
            SPEC_TCP => (What::Ports(TCP), 4),
            SPEC_UDP => (What::Ports(UDP), 4),
            VXLAN if !inner => (What::Vni, 4),
            TAG => {
                let Some(tag) = body.first_chunk::<4>().map(|bytes| u32::from_ne_bytes(*bytes)) else {
                    return invalid("a tag without value".to_owned());
                };
                if tag >= 1 << 24 {
                    return invalid(format!("tag {tag:#x} has more than 24 bits"));
                }
                action.tag = tag;
                continue;
            }
            DROP => {
                action.drop = true;
                continue;
            }
            kind => return Err((Errno::OPNOTSUPP, format!("spec {kind:#x}"))),
        };
        let half = body.len() / 2;
        if half < least || half * 2 != body.len() {
            return invalid(format!("spec {kind:#x}: filters of {half} bytes"));
        }
        let length = half.min(40);
        let (value, mask) = (body[..length].to_vec(), body[half..half + length].to_vec());
        if what == What::V4 && length >= 12 && mask[10] | mask[11] != 0 || what == What::V6 && mask[38] != 0 {
            return Err((Errno::OPNOTSUPP, "time to live, hop limit and IP flags cannot be matched".to_owned()));
        }
        checks.push(Check { what, inner, value, mask });
    }
    if !specs.is_empty() {
        return invalid(format!("{} bytes behind the last spec", specs.len()));
    }
    Ok((checks, action))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame;

    fn spec(kind: u32, value: &[u8], mask: &[u8]) -> Vec<u8> {
        let size = 8 + value.len() + mask.len();
        [&kind.to_ne_bytes()[..], &(size as u16).to_ne_bytes(), &[0, 0], value, mask].concat()
    }

    fn udp() -> Vec<u8> {
        let mut frame = vec![0u8; 60];
        frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[17] = 46;
        frame[23] = UDP;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[34..38].copy_from_slice(&[0x30, 0x39, 0, 53]);
        frame
    }

    #[test]
    fn specs_match_what_they_name_and_nothing_else() {
        let fits = |specs: &[Vec<u8>]| {
            let (checks, _) = read(&specs.concat(), specs.len() as u8).unwrap();
            let frame = udp();
            let layers = frame::parse(&frame);
            checks.iter().all(|check| check.fits(&frame, &layers))
        };
        let mut eth = [0u8; 16];
        eth[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        let mut mask = [0u8; 16];
        mask[..6].fill(0xff);
        assert!(fits(&[spec(ETH, &eth, &mask)]));
        mask[14] = 0x0f;
        assert!(!fits(&[spec(ETH, &eth, &mask)]), "no tag");
        let addresses = [10, 0, 0, 1, 10, 0, 0, 2];
        assert!(fits(&[spec(IPV4, &addresses, &[0xff; 8]), spec(SPEC_UDP, &[0, 53, 0, 0], &[0xff, 0xff, 0, 0])]));
        assert!(!fits(&[spec(SPEC_UDP, &[0, 54, 0, 0], &[0xff, 0xff, 0, 0])]));
        assert!(!fits(&[spec(SPEC_TCP, &[0; 4], &[0; 4])]));
        assert!(!fits(&[spec(IPV6, &[0; 40], &[0; 40])]));
    }

    #[test]
    fn lists_that_do_not_add_up_are_refused() {
        let errno = |specs: &[u8], count| read(specs, count).unwrap_err().0;
        let eth = spec(ETH, &[0; 16], &[0; 16]);
        assert_eq!(errno(&eth, 0), Errno::INVAL);
        assert_eq!(errno(&eth[..20], 1), Errno::INVAL);
        assert_eq!(errno(&spec(ETH, &[0; 6], &[0; 6]), 1), Errno::INVAL);
        assert_eq!(errno(&spec(0x34, &[0; 8], &[0; 8]), 1), Errno::OPNOTSUPP);
        assert_eq!(errno(&spec(TAG, &(1u32 << 24).to_ne_bytes(), &[]), 1), Errno::INVAL);
        assert_eq!(read(&spec(TAG, &7u32.to_ne_bytes(), &[]), 1).unwrap().1.tag, 7);
    }
}
