// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! Steering with the device's own match parameters (mlx5dv_create_flow_matcher(3), mlx5dv_create_flow(3)).
//!
//! A [`Matcher`] says which bits of a packet are compared, at which priority of which table; a [`SteeringRule`] on it says what they are
//! and what becomes of the packets. Table and actions are types: what the kernel allows at reception only cannot be asked for at
//! transmission. Everything keeps what it was made from, so that no order of dropping is wrong.

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

    /// The end of a packet's way, as the library takes it.
    pub trait End {
        fn attrs(&self) -> Vec<mlx5dv_flow_action_attr>;
        fn context(&self) -> Option<&crate::Context>;
    }
}
use sealed::{End, Sealed};

/// A table of the device.
pub trait Table: Sealed + Clone + fmt::Debug + Send + Sync + 'static {
    /// `MLX5DV_FLOW_TABLE_TYPE_*`.
    const TYPE: u32;
    /// Where packets go from here.
    type Fate: End + Clone + fmt::Debug + Send + Sync;
}

/// What the port receives.
#[derive(Clone, Copy, Debug)]
pub enum Ingress {}

/// What the port sends, of all its raw queues.
#[derive(Clone, Copy, Debug)]
pub enum Egress {}

impl Sealed for Ingress {}
impl Sealed for Egress {}

impl Table for Ingress {
    const TYPE: u32 = MLX5DV_FLOW_TABLE_TYPE_NIC_RX;
    type Fate = IngressFate;
}

impl Table for Egress {
    const TYPE: u32 = MLX5DV_FLOW_TABLE_TYPE_NIC_TX;
    type Fate = EgressFate;
}

/// What packets are marked with: 24 bits, which their completions carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowTag(u32);

impl FlowTag {
    /// A mark, unless it has more than 24 bits.
    pub const fn new(mark: u32) -> Option<Self> {
        if mark >> TAG_BITS == 0 { Some(Self(mark)) } else { None }
    }

    /// The mark.
    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Where received packets go.
#[derive(Clone, Debug)]
pub enum IngressFate {
    /// To a queue pair.
    Deliver {
        /// Which.
        to: FlowTarget,
        /// What their completions carry.
        tag: Option<FlowTag>,
    },
    /// Nowhere.
    Drop,
    /// On to what comes after all rules of this kind: the kernel's own.
    DefaultMiss,
}

/// Where sent packets go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EgressFate {
    /// Out of the port.
    Send,
    /// Nowhere.
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

impl End for IngressFate {
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

impl End for EgressFate {
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

/// Match parameters in the device's format: values, or a mask. The fields are in [`wirepath_nic_defs::mlx5`].
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
    /// Writes a field; bits of `value` that do not fit are cut off.
    pub fn set(&mut self, field: MatchField, value: u128) {
        field.set(&mut self.0, value);
    }

    /// A field.
    pub fn get(&self, field: MatchField) -> u128 {
        field.get(&self.0)
    }

    /// `match_criteria_enable` of a mask: the parts that have a bit in them.
    pub fn criteria(&self) -> u8 {
        // The criteria have a bit for each of the first eight; behind them no field lies.
        let parts = self.0.chunks(MATCH_PART).take(8).enumerate();
        parts.fold(0, |criteria, (at, part)| criteria | u8::from(part.iter().any(|byte| *byte != 0)) << at)
    }

    /// Bytes of a mask up to the end of its last part with a bit in it: older kernels do not know the later ones.
    fn used(&self) -> usize {
        (8 - self.criteria().leading_zeros() as usize).max(1) * MATCH_PART
    }

    /// Whether only bits of `mask` are set.
    fn lies_in(&self, mask: &Self) -> bool {
        self.0.iter().zip(&mask.0).all(|(value, mask)| value & !mask == 0)
    }

    /// `struct mlx5dv_flow_match_parameters` with the first `bytes` of the parameters.
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

// SAFETY: libmlx5 locks what it changes.
unsafe impl Send for MatcherInner {}
// SAFETY: as above.
unsafe impl Sync for MatcherInner {}

impl Drop for MatcherInner {
    fn drop(&mut self) {
        let destroy = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_destroy_flow_matcher()?));
        // SAFETY: made by a creation, dropped once; rules on it kept it alive.
        let result = destroy.map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        if let Ok(result) = result {
            self.mlx5.inner().destroyed("mlx5dv_destroy_flow_matcher", Ok(result), || None);
        }
    }
}

/// Which bits of a packet are compared, at one priority of a table. Rules with the same mask share one. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Matcher<T: Table>(Arc<MatcherInner>, std::marker::PhantomData<T>);

impl<T: Table> Matcher<T> {
    /// A matcher of a priority, 0 (asked first) to 15, of which older kernels know the first 8.
    ///
    /// # Errors
    /// The device cannot compare these bits, or has no such table.
    pub fn new(mlx5: &Mlx5, priority: u16, mask: &MatchParameters) -> Result<Self> {
        let library = mlx5.library()?;
        let create = library.mlx5dv_create_flow_matcher()?;
        library.mlx5dv_destroy_flow_matcher()?;
        let mut parameters = mask.encode(mask.used());
        let mut attr = mlx5dv_flow_matcher_attr::zeroed();
        attr.priority = priority;
        attr.match_criteria_enable = mask.criteria();
        attr.match_mask = parameters.as_mut_ptr().cast();
        // Reception is what every version takes for granted.
        if T::TYPE != MLX5DV_FLOW_TABLE_TYPE_NIC_RX {
            attr.comp_mask = MLX5DV_FLOW_MATCHER_MASK_FT_TYPE;
            attr.ft_type = T::TYPE;
        }
        // SAFETY: an open context of libmlx5; the mask is followed by as many bytes as it says.
        let raw = unsafe { create(mlx5.inner().raw.as_ptr(), &raw mut attr) };
        let raw = mlx5.inner().created("mlx5dv_create_flow_matcher", raw, None)?;
        let inner = MatcherInner { raw, mlx5: mlx5.clone(), mask: mask.clone() };
        Ok(Self(Arc::new(inner), std::marker::PhantomData))
    }

    /// Whether anything else has it.
    pub fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// What becomes of the packets of a rule: at most one header modification, one reformat and one counter, as the kernel has it.
#[derive(Clone, Debug)]
pub struct Actions<T: Table> {
    /// Where they go.
    pub fate: T::Fate,
    /// What is written into their headers.
    pub modify: Option<ModifyHeader<T>>,
    /// What is put in front of them, or taken off.
    pub reformat: Option<Reformat<T>>,
    /// Where they are counted.
    pub counter: Option<FlowCounter>,
}

impl<T: Table> Actions<T> {
    /// Nothing but where they go.
    pub fn only(fate: T::Fate) -> Self {
        Self { fate, modify: None, reformat: None, counter: None }
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
        attrs.extend(self.fate.attrs());
        attrs
    }

    /// The contexts of everything in it.
    fn contexts(&self) -> impl Iterator<Item = &Context> {
        let reformat = self.reformat.as_ref().map(|reformat| reformat.action.context());
        let modify = self.modify.as_ref().map(|modify| modify.action.context());
        let counter = self.counter.as_ref().map(FlowCounter::context);
        [reformat, modify, counter, self.fate.context()].into_iter().flatten()
    }
}

/// A rule in a table, in force until it is dropped. Keeps its matcher, queue pair, actions and counter.
#[derive(Debug)]
pub struct SteeringRule<T: Table> {
    raw: NonNull<ibv_flow>,
    matcher: Matcher<T>,
    _actions: Actions<T>,
}

// SAFETY: libmlx5 locks what it changes.
unsafe impl<T: Table> Send for SteeringRule<T> {}
// SAFETY: as above.
unsafe impl<T: Table> Sync for SteeringRule<T> {}

impl<T: Table> Drop for SteeringRule<T> {
    fn drop(&mut self) {
        // SAFETY: made by a creation, dropped once.
        let result = unsafe { ibv_destroy_flow(self.raw.as_ptr()) };
        self.matcher.0.mlx5.inner().destroyed("ibv_destroy_flow", Ok(result), || None);
    }
}

impl<T: Table> SteeringRule<T> {
    /// Has packets whose bits under the matcher's mask are those of `value` treated this way.
    ///
    /// # Errors
    /// `value` has bits outside the mask, an action is of another device, or the device refused: `CAP_NET_RAW` is missing, a priority
    /// or a combination is not known, the table is full.
    pub fn new(matcher: &Matcher<T>, value: &MatchParameters, actions: &Actions<T>) -> Result<Self> {
        let MatcherInner { raw, mlx5, mask } = &*matcher.0;
        if !value.lies_in(mask) {
            return Err(Error::Request(format!("values outside the mask: {value:?} under {mask:?}")));
        }
        for context in actions.contexts() {
            mlx5.context.same_as(context)?;
        }
        let mut parameters = value.encode(mask.used());
        let library = mlx5.library()?;
        // SAFETY: a living matcher; as many bytes of values as they say; the actions point to living objects of the same context.
        let rule = unsafe { library.create_flow(raw.as_ptr(), parameters.as_mut_ptr().cast(), &actions.attrs()) }?;
        let rule = mlx5.inner().created("mlx5dv_create_flow", rule, None)?;
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
        assert_eq!((mask.criteria(), mask.used()), (0, 64), "a mask of nothing still has a part");
        mask.set(header::DST_IPV4, 0xffff_ffff);
        assert_eq!((mask.criteria(), mask.used()), (CRITERIA_OUTER, 64));
        mask.set(misc::VXLAN_VNI, 0xff_ffff);
        mask.set(header::IP_VERSION.inner(), 15);
        assert_eq!((mask.criteria(), mask.used()), (CRITERIA_OUTER | CRITERIA_MISC | CRITERIA_INNER, 192));
        mask.set(misc3::ICMP_TYPE, 0xff);
        assert_eq!(mask.used(), 320);
        let bytes: Vec<u8> = mask.encode(mask.used()).into_iter().flat_map(u64::to_ne_bytes).collect();
        assert_eq!(bytes[..8], 320usize.to_ne_bytes());
        assert_eq!(bytes.len(), 8 + 320);
        assert_eq!((&bytes[8 + 0x3c..8 + 0x40], &bytes[8 + 0x54..8 + 0x57]), (&[0xff; 4][..], &[0xff; 3][..]));
        let mut value = MatchParameters::default();
        value.set(misc::VXLAN_VNI, 42);
        assert!(value.lies_in(&mask));
        value.set(misc::GRE_KEY, 1);
        assert!(!value.lies_in(&mask));
    }

    #[test]
    fn marks_have_24_bits() {
        assert_eq!(FlowTag::new(0xff_ffff).map(FlowTag::get), Some(0xff_ffff));
        assert_eq!(FlowTag::new(1 << 24), None);
    }

    #[test]
    fn ends_are_the_actions_of_the_library() {
        let kinds = |attrs: Vec<mlx5dv_flow_action_attr>| attrs.iter().map(|attr| attr.type_).collect::<Vec<_>>();
        assert_eq!(kinds(Actions::<Ingress>::only(IngressFate::Drop).attrs()), [MLX5DV_FLOW_ACTION_DROP]);
        assert_eq!(
            kinds(Actions::<Ingress>::only(IngressFate::DefaultMiss).attrs()),
            [MLX5DV_FLOW_ACTION_DEFAULT_MISS]
        );
        assert!(Actions::<Egress>::only(EgressFate::Send).attrs().is_empty());
    }
}
