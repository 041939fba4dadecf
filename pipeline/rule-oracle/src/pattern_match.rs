//! Pattern matching, item by item, as the documentation of the rule language describes it.

use wirepath_flow::{HeaderType, Item, ItemKind, Layer};

use crate::fields::{PacketMetadata, header, label_position_after, value};
use crate::headers::{Fragment, Headers, LabelPosition};
use crate::reference::Fault;

/// Returns true if the packet has every header that the pattern names, with these field values.
pub(crate) fn fits(pattern: &[Item], frame: &[u8], headers: &Headers, metadata: &PacketMetadata, fault: Fault) -> bool {
    let mut before: Option<&Item> = None;
    let mut nth = 0;
    // Position of the label stack that the pattern has named in this header stack.
    let mut named = None;
    for item in pattern {
        let inner = if fault == Fault::WrongLevel { false } else { item.inner };
        let Some(stack) = headers.stacks.get(usize::from(inner)) else { return false };
        let new_stack = before.is_none_or(|b| b.inner != item.inner);
        nth = if !new_stack && before.is_some_and(|b| b.kind == item.kind) { nth + 1 } else { 0 };
        if new_stack {
            named = None;
        }
        let last = before.filter(|_| !new_stack).map(|b| b.kind);
        if item.kind == ItemKind::Mpls && nth == 0 {
            let position = label_position_after(last);
            named = Some(position);
            if !stack.labelled(position) {
                return false;
            }
        }
        // The pattern may not skip labels.
        if fault != Fault::LabelsSkipped {
            // An item behind the position of labels after Ethernet requires that there are none.
            let behind_labels = item.kind.spec().layer > Layer::Label;
            if behind_labels && named != Some(LabelPosition::Link) && stack.labelled(LabelPosition::Link) {
                return false;
            }
            // An item after UDP or GRE requires the next header directly behind it.
            if new_stack && item.inner {
                let outer = &headers.stacks[0];
                match before.map(|b| b.kind) {
                    Some(ItemKind::Gre) if outer.labelled(LabelPosition::Gre) => return false,
                    Some(ItemKind::Udp) if outer.labelled(LabelPosition::Udp) => return false,
                    _ => {}
                }
            }
        }
        if header(stack, item.kind, nth).is_none() {
            let number =
                item.kind.spec().header_types.iter().find(|(fact, _)| *fact == HeaderType::Transport).map(|(_, n)| *n);
            let later = stack.fragment == Fragment::Later && number == Some(stack.protocol);
            if !(fault == Fault::HeadersInLaterFragments && later && item.fields().is_empty()) {
                return false;
            }
        }
        for &(field, bits) in item.fields() {
            let Some(value) = value(frame, stack, metadata, nth, field) else { return false };
            let mask = match fault {
                Fault::MaskBit => bits.mask & !(1 << (127 - bits.mask.leading_zeros())),
                _ => bits.mask,
            };
            if value & mask != bits.value & mask {
                return false;
            }
        }
        before = Some(item);
    }
    true
}
