// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! Steering with the device's own match parameters (mlx5dv_create_flow_matcher(3), mlx5dv_create_flow(3)).
//!
//! A [`Matcher`] selects the bits of a packet that are compared, at a priority of a table. A [`SteeringRule`] on it
//! defines their values and the actions. Tables and actions are types, so actions that the kernel allows only at
//! ingress do not compile at egress. Objects keep what they were created from, so every drop order is valid.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::mlx5dv::*;
use rdma_core_sys::verbs::*;
use wirepath_nic_defs::mlx5::{MATCH_BYTES, MATCH_PART, MatchField};

use super::Mlx5;
use super::actions::{FlowCounter, ModifyHeader, Reformat};
use crate::flow::{FlowTarget, TAG_BITS};
use crate::{Context, Error, Result};

mod sealed {
    use rdma_core_sys::mlx5dv::mlx5dv_flow_action_attr;

    pub trait Sealed {}

    /// Conversion of a destination to flow action attributes of libmlx5.
    pub trait DestinationAttrs {
        fn attrs(&self) -> Vec<mlx5dv_flow_action_attr>;
        fn context(&self) -> Option<&crate::Context>;
    }
}
use sealed::{DestinationAttrs, Sealed};

/// Steering table of the device.
pub trait Table: Sealed + Clone + fmt::Debug + Send + Sync + 'static {
    /// Table type (`MLX5DV_FLOW_TABLE_TYPE_*`).
    const TYPE: u32;
    /// Destinations of packets in this table.
    type Destination: DestinationAttrs + Clone + fmt::Debug + Send + Sync;
}

/// Table of received packets.
#[derive(Clone, Copy, Debug)]
pub enum Ingress {}

/// Table of packets that all raw queues of the port send.
#[derive(Clone, Copy, Debug)]
pub enum Egress {}

impl Sealed for Ingress {}
impl Sealed for Egress {}

impl Table for Ingress {
    const TYPE: u32 = MLX5DV_FLOW_TABLE_TYPE_NIC_RX;
    type Destination = IngressDestination;
}

impl Table for Egress {
    const TYPE: u32 = MLX5DV_FLOW_TABLE_TYPE_NIC_TX;
    type Destination = EgressDestination;
}

/// Tag of 24 bits that a rule attaches to packets and that their CQEs carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowTag(u32);

impl FlowTag {
    /// Creates a tag, or returns `None` if `tag` has more than 24 bits.
    pub const fn new(tag: u32) -> Option<Self> {
        if tag >> TAG_BITS == 0 { Some(Self(tag)) } else { None }
    }

    /// Returns the value of the tag.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Destination of received packets.
#[derive(Clone, Debug)]
pub enum IngressDestination {
    /// Deliver to a queue pair.
    Deliver {
        /// Queue pair.
        to: FlowTarget,
        /// Tag in the CQEs of the packets.
        tag: Option<FlowTag>,
    },
    /// Drop.
    Drop,
    /// Continue with the kernel's own rules, which follow all rules of this kind.
    DefaultMiss,
}

/// Destination of sent packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressDestination {
    /// Send out of the port.
    Send,
    /// Drop.
    Drop,
}

fn attr(kind: u32, object: mlx5dv_flow_action_object) -> mlx5dv_flow_action_attr {
    let mut attr = mlx5dv_flow_action_attr::zeroed();
    (attr.type_, attr.object) = (kind, object);
    attr
}

fn plain(kind: u32) -> mlx5dv_flow_action_attr {
    attr(kind, mlx5dv_flow_action_object { obj: std::ptr::null_mut() })
}

impl DestinationAttrs for IngressDestination {
    fn attrs(&self) -> Vec<mlx5dv_flow_action_attr> {
        match self {
            Self::Deliver { to, tag } => {
                let object = mlx5dv_flow_action_object { qp: to.raw().as_ptr() };
                let mut attrs = vec![attr(MLX5DV_FLOW_ACTION_DEST_IBV_QP, object)];
                attrs.extend(tag.map(|tag| {
                    let mut attr = plain(MLX5DV_FLOW_ACTION_TAG);
                    attr.object.tag_value = tag.get();
                    attr
                }));
                attrs
            }
            Self::Drop => vec![plain(MLX5DV_FLOW_ACTION_DROP)],
            Self::DefaultMiss => vec![plain(MLX5DV_FLOW_ACTION_DEFAULT_MISS)],
        }
    }

    fn context(&self) -> Option<&Context> {
        match self {
            Self::Deliver { to, .. } => Some(&to.domain().context),
            _ => None,
        }
    }
}

impl DestinationAttrs for EgressDestination {
    fn attrs(&self) -> Vec<mlx5dv_flow_action_attr> {
        match self {
            Self::Send => Vec::new(),
            Self::Drop => vec![plain(MLX5DV_FLOW_ACTION_DROP)],
        }
    }

    fn context(&self) -> Option<&Context> {
        None
    }
}

/// Match parameters (values or a mask) in the format of the device. [`wirepath_nic_defs::mlx5`] defines the fields.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct MatchParameters([u8; MATCH_BYTES]);

impl Default for MatchParameters {
    fn default() -> Self {
        Self([0; MATCH_BYTES])
    }
}

impl fmt::Debug for MatchParameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.0.as_chunks().0.iter().enumerate().filter(|(_, word)| **word != [0; 4]);
        f.debug_map().entries(words.map(|(at, word)| (at * 4, u32::from_be_bytes(*word)))).finish()
    }
}

impl MatchParameters {
    /// Writes a field. Bits of `value` that do not fit are discarded.
    pub fn set(&mut self, field: MatchField, value: u128) {
        field.set(&mut self.0, value);
    }

    /// Reads a field.
    pub fn get(&self, field: MatchField) -> u128 {
        field.get(&self.0)
    }

    /// Returns `match_criteria_enable` of a mask: one bit for each part that is not zero.
    pub fn criteria(&self) -> u8 {
        // The criteria have a bit for each of the first eight parts. Later parts contain no fields.
        let parts = self.0.chunks(MATCH_PART).take(8).enumerate();
        parts.fold(0, |criteria, (at, part)| criteria | u8::from(part.iter().any(|byte| *byte != 0)) << at)
    }

    /// Returns the bytes of a mask up to the end of its last non-zero part. Older kernels do not know the later parts.
    fn encoded_bytes(&self) -> usize {
        (8 - self.criteria().leading_zeros() as usize).max(1) * MATCH_PART
    }

    /// Returns true if only bits of `mask` are set.
    fn is_subset_of(&self, mask: &Self) -> bool {
        self.0.iter().zip(&mask.0).all(|(value, mask)| value & !mask == 0)
    }

    /// Encodes a `struct mlx5dv_flow_match_parameters` with the first `bytes` bytes of the parameters.
    fn encode(&self, bytes: usize) -> Vec<u64> {
        let mut all = bytes.to_ne_bytes().to_vec();
        all.extend_from_slice(&self.0[..bytes]);
        all.resize(all.len().next_multiple_of(8), 0);
        all.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
    }
}

#[derive(Debug)]
struct MatcherInner {
    raw: NonNull<mlx5dv_flow_matcher>,
    mlx5: Mlx5,
    mask: MatchParameters,
}

// SAFETY: `raw` is an owned pointer, and libmlx5 locks the state that it changes.
unsafe impl Send for MatcherInner {}
// SAFETY: libmlx5 locks the state that it changes.
unsafe impl Sync for MatcherInner {}

impl Drop for MatcherInner {
    fn drop(&mut self) {
        let destroy = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_destroy_flow_matcher()?));
        // SAFETY: the matcher is alive and is destroyed once. Rules on it keep it alive, so none is left.
        let result = destroy.map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        if let Ok(result) = result {
            self.mlx5.inner().check_destroyed("mlx5dv_destroy_flow_matcher", Ok(result), || None);
        }
    }
}

/// Matcher: the bits of a packet that are compared, at one priority of a table. Rules with the same mask share one
/// matcher. Clones refer to the same matcher.
#[derive(Clone, Debug)]
pub struct Matcher<T: Table>(Arc<MatcherInner>, std::marker::PhantomData<T>);

impl<T: Table> Matcher<T> {
    /// Creates a matcher. `priority` is 0 (highest) to 15; older kernels support 0 to 7.
    ///
    /// # Errors
    /// The device cannot compare these bits, or does not have this table.
    pub fn new(mlx5: &Mlx5, priority: u16, mask: &MatchParameters) -> Result<Self> {
        let library = mlx5.library()?;
        let create = library.mlx5dv_create_flow_matcher()?;
        library.mlx5dv_destroy_flow_matcher()?;
        let mut parameters = mask.encode(mask.encoded_bytes());
        let mut attr = mlx5dv_flow_matcher_attr::zeroed();
        attr.priority = priority;
        attr.match_criteria_enable = mask.criteria();
        attr.match_mask = parameters.as_mut_ptr().cast();
        // Ingress is the default of every version.
        if T::TYPE != MLX5DV_FLOW_TABLE_TYPE_NIC_RX {
            attr.comp_mask = MLX5DV_FLOW_MATCHER_MASK_FT_TYPE;
            attr.ft_type = T::TYPE;
        }
        // SAFETY: the context is open and belongs to libmlx5. `parameters` contains as many bytes of mask as its
        // length field says.
        let raw = unsafe { create(mlx5.inner().raw.as_ptr(), &raw mut attr) };
        let raw = mlx5.inner().check_created("mlx5dv_create_flow_matcher", raw, None)?;
        let inner = MatcherInner { raw, mlx5: mlx5.clone(), mask: mask.clone() };
        Ok(Self(Arc::new(inner), std::marker::PhantomData))
    }

    /// Returns true if another object refers to it.
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// Actions of a rule. The kernel supports at most one header modification, one reformat and one counter.
#[derive(Clone, Debug)]
pub struct Actions<T: Table> {
    /// Destination of the packets.
    pub destination: T::Destination,
    /// Header modification.
    pub modify: Option<ModifyHeader<T>>,
    /// Packet reformat (encapsulation or decapsulation).
    pub reformat: Option<Reformat<T>>,
    /// Counter.
    pub counter: Option<FlowCounter>,
}

impl<T: Table> Actions<T> {
    /// Creates actions with a destination only.
    pub fn only(destination: T::Destination) -> Self {
        Self { destination, modify: None, reformat: None, counter: None }
    }

    fn attrs(&self) -> Vec<mlx5dv_flow_action_attr> {
        let of = |action: &crate::flow::FlowAction| {
            attr(MLX5DV_FLOW_ACTION_IBV_FLOW_ACTION, mlx5dv_flow_action_object { action: action.raw().as_ptr() })
        };
        let mut attrs = Vec::new();
        attrs.extend(self.reformat.as_ref().map(|reformat| of(&reformat.action)));
        attrs.extend(self.modify.as_ref().map(|modify| of(&modify.action)));
        attrs.extend(self.counter.as_ref().map(|counter| {
            attr(MLX5DV_FLOW_ACTION_COUNTERS_DEVX, mlx5dv_flow_action_object { obj: counter.raw().as_ptr() })
        }));
        attrs.extend(self.destination.attrs());
        attrs
    }

    /// Returns the contexts of all objects in the actions.
    fn contexts(&self) -> impl Iterator<Item = &Context> {
        let reformat = self.reformat.as_ref().map(|reformat| reformat.action.context());
        let modify = self.modify.as_ref().map(|modify| modify.action.context());
        let counter = self.counter.as_ref().map(FlowCounter::context);
        [reformat, modify, counter, self.destination.context()].into_iter().flatten()
    }
}

/// Rule in a table. It is active until it is dropped, and keeps its matcher, queue pair, actions and counter alive.
#[derive(Debug)]
pub struct SteeringRule<T: Table> {
    raw: NonNull<ibv_flow>,
    matcher: Matcher<T>,
    _actions: Actions<T>,
}

// SAFETY: `raw` is an owned pointer, and libmlx5 locks the state that it changes.
unsafe impl<T: Table> Send for SteeringRule<T> {}
// SAFETY: libmlx5 locks the state that it changes.
unsafe impl<T: Table> Sync for SteeringRule<T> {}

impl<T: Table> Drop for SteeringRule<T> {
    fn drop(&mut self) {
        // SAFETY: the rule is alive and is destroyed once.
        let result = unsafe { ibv_destroy_flow(self.raw.as_ptr()) };
        self.matcher.0.mlx5.inner().check_destroyed("ibv_destroy_flow", Ok(result), || None);
    }
}

impl<T: Table> SteeringRule<T> {
    /// Creates a rule that applies `actions` to packets whose bits under the matcher's mask equal `value`.
    ///
    /// # Errors
    /// `value` has bits outside the mask, or an action belongs to another device. Or the device rejects the rule:
    /// `CAP_NET_RAW` is missing, the priority or the combination is not supported, or the table is full.
    pub fn new(matcher: &Matcher<T>, value: &MatchParameters, actions: &Actions<T>) -> Result<Self> {
        let MatcherInner { raw, mlx5, mask } = &*matcher.0;
        if !value.is_subset_of(mask) {
            return Err(Error::InvalidRequest(format!(
                "the value has bits outside the mask: {value:?}, mask {mask:?}"
            )));
        }
        for context in actions.contexts() {
            mlx5.context.check_same_context(context)?;
        }
        let mut parameters = value.encode(mask.encoded_bytes());
        let library = mlx5.library()?;
        // SAFETY: the matcher is alive. `parameters` contains as many bytes of values as its length field says. The
        // actions refer to living objects of the same context.
        let rule = unsafe { library.create_flow(raw.as_ptr(), parameters.as_mut_ptr().cast(), &actions.attrs()) }?;
        let rule = mlx5.inner().check_created("mlx5dv_create_flow", rule, None)?;
        Ok(Self { raw: rule, matcher: matcher.clone(), _actions: actions.clone() })
    }
}

#[cfg(test)]
mod tests {
    use wirepath_nic_defs::mlx5::{CRITERIA_INNER, CRITERIA_MISC, CRITERIA_OUTER, header, misc, misc3};

    use super::*;

    #[test]
    fn criteria_and_length_follow_from_the_mask() {
        let mut mask = MatchParameters::default();
        assert_eq!((mask.criteria(), mask.encoded_bytes()), (0, 64), "an empty mask has one part");
        mask.set(header::DST_IPV4, 0xffff_ffff);
        assert_eq!((mask.criteria(), mask.encoded_bytes()), (CRITERIA_OUTER, 64));
        mask.set(misc::VXLAN_VNI, 0xff_ffff);
        mask.set(header::IP_VERSION.inner(), 15);
        assert_eq!((mask.criteria(), mask.encoded_bytes()), (CRITERIA_OUTER | CRITERIA_MISC | CRITERIA_INNER, 192));
        mask.set(misc3::ICMP_TYPE, 0xff);
        assert_eq!(mask.encoded_bytes(), 320);
        let bytes: Vec<u8> = mask.encode(mask.encoded_bytes()).into_iter().flat_map(u64::to_ne_bytes).collect();
        assert_eq!(bytes[..8], 320usize.to_ne_bytes());
        assert_eq!(bytes.len(), 8 + 320);
        assert_eq!((&bytes[8 + 0x3c..8 + 0x40], &bytes[8 + 0x54..8 + 0x57]), (&[0xff; 4][..], &[0xff; 3][..]));
        let mut value = MatchParameters::default();
        value.set(misc::VXLAN_VNI, 42);
        assert!(value.is_subset_of(&mask));
        value.set(misc::GRE_KEY, 1);
        assert!(!value.is_subset_of(&mask));
    }

    #[test]
    fn flow_tags_have_24_bits() {
        assert_eq!(FlowTag::new(0xff_ffff).map(FlowTag::get), Some(0xff_ffff));
        assert_eq!(FlowTag::new(1 << 24), None);
    }

    #[test]
    fn destinations_become_flow_actions() {
        let kinds = |attrs: Vec<mlx5dv_flow_action_attr>| attrs.iter().map(|attr| attr.type_).collect::<Vec<_>>();
        assert_eq!(kinds(Actions::<Ingress>::only(IngressDestination::Drop).attrs()), [MLX5DV_FLOW_ACTION_DROP]);
        assert_eq!(
            kinds(Actions::<Ingress>::only(IngressDestination::DefaultMiss).attrs()),
            [MLX5DV_FLOW_ACTION_DEFAULT_MISS]
        );
        assert!(Actions::<Egress>::only(EgressDestination::Send).attrs().is_empty());
    }
}
