//! Decoder of `ibv_create_flow` specs in the kernel's layout. Source: Linux
//! `drivers/infiniband/core/uverbs_cmd.c` (`kern_spec_to_ib_spec`, `ib_uverbs_ex_create_flow`).

use rustix::io::Errno;
use wirepath_nic_defs::uverbs as defs;

use super::objects::{ObjectKind, Objects};
use crate::rules::FlowSpec;

/// Length of the header of a spec: type, size and two bytes of zeros.
const HEAD: usize = 8;
/// Maximum number of specs of a rule.
pub(super) const MOST: u8 = 10;

/// Errno and reason of a refused rule.
pub(super) type RuleError = (Errno, String);

fn invalid<T>(why: impl Into<String>) -> Result<T, RuleError> {
    Err((Errno::INVAL, why.into()))
}

/// Returns the length of the kernel's filter structure, if a rule can match this kind.
fn filter_bytes(kind: u32) -> Option<usize> {
    Some(match kind & !defs::SPEC_INNER {
        defs::SPEC_ETH => 16,
        defs::SPEC_IPV4 => 12,
        defs::SPEC_IPV6 => 40,
        defs::SPEC_TCP | defs::SPEC_UDP | defs::SPEC_MPLS => 4,
        defs::SPEC_ESP | defs::SPEC_GRE => 8,
        // Tunnel headers exist in the outer packet only.
        defs::SPEC_VXLAN if kind & defs::SPEC_INNER == 0 => 4,
        _ => return None,
    })
}

/// Decodes a list of `count` specs; the handles that they name are added to `needs`.
pub(super) fn read(
    mut bytes: &[u8],
    count: u8,
    objects: &Objects,
    needs: &mut Vec<u32>,
) -> Result<Vec<FlowSpec>, RuleError> {
    let mut specs = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let Some(head) = bytes.first_chunk::<HEAD>() else { return invalid("a truncated spec") };
        let kind = u32::from_ne_bytes(head[..4].try_into().expect("four bytes"));
        let size = usize::from(u16::from_ne_bytes([head[4], head[5]]));
        if size < HEAD || size > bytes.len() || !size.is_multiple_of(4) || head[6..] != [0, 0] {
            return invalid(format!("spec {kind:#x} of {size} bytes"));
        }
        let (spec, rest) = bytes.split_at(size);
        bytes = rest;
        let body = &spec[HEAD..];
        specs.push(match kind {
            defs::SPEC_TAG | defs::SPEC_HANDLE | defs::SPEC_COUNT => {
                let Ok(body) = <&[u8; 8]>::try_from(body) else {
                    return invalid(format!("spec {kind:#x} of {size} bytes; expected 16"));
                };
                let word = u32::from_ne_bytes(body[..4].try_into().expect("four bytes"));
                let mut object = |kind| match objects.id(word, kind) {
                    Ok(id) => {
                        needs.push(word);
                        Ok(id)
                    }
                    Err(_) => invalid(format!("handle {word} is not of kind {kind:?}")),
                };
                match kind {
                    defs::SPEC_TAG => FlowSpec::Tag(word),
                    defs::SPEC_HANDLE => FlowSpec::Action(object(ObjectKind::FlowAction)?),
                    _ => FlowSpec::Count(object(ObjectKind::Counters)?),
                }
            }
            defs::SPEC_DROP if body.is_empty() => FlowSpec::Drop,
            _ => filters(kind, body)?,
        });
    }
    if !bytes.is_empty() {
        return invalid(format!("{} bytes behind the last spec", bytes.len()));
    }
    Ok(specs)
}

fn filters(kind: u32, body: &[u8]) -> Result<FlowSpec, RuleError> {
    let Some(known) = filter_bytes(kind) else { return invalid(format!("unknown spec {kind:#x}")) };
    let length = body.len() / 2;
    if length == 0 || length * 2 != body.len() {
        return invalid(format!("spec {kind:#x}: filters of {length} bytes"));
    }
    let (value, mask) = body.split_at(length);
    if mask.get(known..).is_some_and(|more| more.iter().any(|byte| *byte != 0)) {
        return invalid(format!("spec {kind:#x}: the mask covers unknown fields"));
    }
    // Filters of an older program are shorter, those of a newer one longer.
    let fit = |bytes: &[u8]| {
        let mut bytes = bytes[..length.min(known)].to_vec();
        bytes.resize(known, 0);
        bytes
    };
    let (value, mask) = (fit(value), fit(mask));
    let beyond = |at: usize, bits: u32| {
        [&value, &mask]
            .iter()
            .any(|part| u32::from_be_bytes(part[at..at + 4].try_into().expect("four bytes")) >> bits != 0)
    };
    let plain = kind & !defs::SPEC_INNER;
    if plain == defs::SPEC_IPV6 && beyond(32, 20) || plain == defs::SPEC_VXLAN && beyond(0, 24) {
        return invalid(format!("spec {kind:#x}: a flow label or identifier with too many bits"));
    }
    Ok(FlowSpec::Match { kind: plain, inner: kind & defs::SPEC_INNER != 0, value, mask })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(kind: u32, body: &[u8]) -> Vec<u8> {
        [&kind.to_ne_bytes()[..], &((HEAD + body.len()) as u16).to_ne_bytes(), &[0, 0], body].concat()
    }

    fn all(specs: &[Vec<u8>]) -> Result<Vec<FlowSpec>, RuleError> {
        read(&specs.concat(), specs.len() as u8, &Objects::default(), &mut Vec::new())
    }

    #[test]
    fn specs_of_older_and_newer_programs_are_accepted() {
        let short = all(&[spec(defs::SPEC_IPV4, &[[1; 8], [0xff; 8]].concat())]).unwrap();
        let FlowSpec::Match { value, mask, .. } = &short[0] else { panic!("{short:?}") };
        assert_eq!((&value[..], &mask[8..]), (&[1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0][..], &[0; 4][..]));
        let mut long = [[1; 16], [0xff; 16]].concat();
        assert_eq!(all(&[spec(defs::SPEC_IPV4, &long)]).unwrap_err().0, Errno::INVAL, "unknown fields are masked");
        long[28..].fill(0);
        assert!(all(&[spec(defs::SPEC_IPV4, &long)]).is_ok());
    }

    #[test]
    fn inconsistent_spec_lists_are_refused() {
        let refused = |specs: &[Vec<u8>]| all(specs).unwrap_err().0 == Errno::INVAL;
        let eth = spec(defs::SPEC_ETH, &[0; 32]);
        assert!(all(std::slice::from_ref(&eth)).is_ok());
        assert!(read(&eth, 0, &Objects::default(), &mut Vec::new()).is_err(), "left-over bytes");
        assert!(read(&eth, 2, &Objects::default(), &mut Vec::new()).is_err(), "too few");
        assert!(read(&eth[..36], 1, &Objects::default(), &mut Vec::new()).is_err(), "cut off");
        assert!(refused(&[spec(defs::SPEC_ETH | 0x80, &[0; 32])]));
        assert!(refused(&[spec(defs::SPEC_VXLAN | defs::SPEC_INNER, &[0; 8])]));
        assert!(refused(&[spec(defs::SPEC_VXLAN, &[1, 0, 0, 0, 0, 0, 0, 0])]), "25 bits");
        assert!(refused(&[spec(defs::SPEC_TAG, &[0; 4])]));
        assert!(refused(&[spec(defs::SPEC_HANDLE, &[0; 8])]), "no such flow action");
        assert!(refused(&[spec(defs::SPEC_COUNT, &[0; 8])]), "no such counters");
        assert!(refused(&[spec(defs::SPEC_TCP, &[0; 6])]), "not a multiple of four");
        assert_eq!(all(&[spec(defs::SPEC_TAG, &[7, 0, 0, 0, 0, 0, 0, 0])]).unwrap(), [FlowSpec::Tag(7)]);
        assert_eq!(all(&[spec(defs::SPEC_DROP, &[])]).unwrap(), [FlowSpec::Drop]);
    }
}
