//! Whether a packet fits a pattern: item after item, as the rules of the language say it in words.

use wirepath_pmd::flow::{Fact, Item, ItemKind, Layer};

use crate::fields::{Noted, header, place_behind, value};
use crate::headers::{Fragment, Headers, Place};
use crate::reference::Fault;

/// Whether the packet has every header that the pattern names, with these values in its fields.
pub(crate) fn fits(pattern: &[Item], frame: &[u8], headers: &Headers, noted: &Noted, fault: Fault) -> bool {
    let mut before: Option<&Item> = None;
    let mut nth = 0;
    // The place of the label stack that the pattern has named in this stack.
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
            let place = place_behind(last);
            named = Some(place);
            if !stack.labelled(place) {
                return false;
            }
        }
        // Labels are never skipped.
        if fault != Fault::LabelsSkipped {
            // Whatever stands behind the place of labels behind Ethernet says that there are none.
            let behind_labels = item.kind.spec().layer > Layer::Label;
            if behind_labels && named != Some(Place::Link) && stack.labelled(Place::Link) {
                return false;
            }
            // What is named next after UDP or GRE stands directly behind it.
            if new_stack && item.inner {
                let outer = &headers.stacks[0];
                match before.map(|b| b.kind) {
                    Some(ItemKind::Gre) if outer.labelled(Place::Gre) => return false,
                    Some(ItemKind::Udp) if outer.labelled(Place::Udp) => return false,
                    _ => {}
                }
            }
        }
        if header(stack, item.kind, nth).is_none() {
            let number = item.kind.spec().facts.iter().find(|(fact, _)| *fact == Fact::Transport).map(|(_, n)| *n);
            let later = stack.fragment == Fragment::Later && number == Some(stack.protocol);
            if !(fault == Fault::HeadersInLaterFragments && later && item.fields().is_empty()) {
                return false;
            }
        }
        for &(field, bits) in item.fields() {
            let Some(value) = value(frame, stack, noted, nth, field) else { return false };
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
