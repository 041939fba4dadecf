// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Flow rules (ibv_create_flow(3)): they direct matching frames of a port to a queue pair and apply actions.

mod counters;
mod spec;

#[cfg(test)]
mod tests;

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;

pub use self::counters::{CounterKind, Counters};
pub use self::spec::*;
use crate::domain::DomainInner;
use crate::{Context, Error, RawPacketQp, Result, RssQp};

/// Number of bits in a flow tag.
pub const TAG_BITS: u32 = 24;

/// Destination queue pair of a flow rule.
#[derive(Clone, Debug)]
pub enum FlowTarget {
    /// RSS queue pair, which distributes packets over queues.
    Rss(RssQp),
    /// Receive queue of a raw-packet queue pair.
    Pair(RawPacketQp),
}

impl From<&RssQp> for FlowTarget {
    fn from(pair: &RssQp) -> Self {
        Self::Rss(pair.clone())
    }
}

impl From<&RawPacketQp> for FlowTarget {
    fn from(pair: &RawPacketQp) -> Self {
        Self::Pair(pair.clone())
    }
}

impl FlowTarget {
    pub(crate) fn raw(&self) -> NonNull<ibv_qp> {
        match self {
            Self::Rss(pair) => pair.0.raw,
            Self::Pair(pair) => pair.0.raw,
        }
    }

    pub(crate) fn domain(&self) -> &DomainInner {
        match self {
            Self::Rss(pair) => &pair.0.domain,
            Self::Pair(pair) => &pair.0.domain,
        }
    }
}

/// Flow action of a provider (`struct ibv_flow_action`): on mlx5 a packet reformat or a header modification.
#[derive(Debug)]
pub(crate) struct FlowActionInner {
    raw: NonNull<ibv_flow_action>,
    context: Context,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for FlowActionInner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for FlowActionInner {}

impl Drop for FlowActionInner {
    fn drop(&mut self) {
        // SAFETY: the action is alive and is destroyed once. Flow rules keep it alive, so none is left.
        let result = unsafe { ibv_destroy_flow_action(self.raw.as_ptr()) };
        self.context.inner.check_destroyed("ibv_destroy_flow_action", Ok(result), || None);
    }
}

/// Flow action of a provider, for [`Flow::action`]. Clones refer to the same action.
#[derive(Clone, Debug)]
pub struct FlowAction(Arc<FlowActionInner>);

impl FlowAction {
    /// Takes ownership of the action that the function `call` returned.
    ///
    /// # Safety
    /// The caller guarantees that `raw` is a new action of `context` that nothing else owns, or null with errno set.
    pub(crate) unsafe fn from_raw(context: &Context, call: &'static str, raw: *mut ibv_flow_action) -> Result<Self> {
        let raw = context.inner.check_created(call, raw, None)?;
        Ok(Self(Arc::new(FlowActionInner { raw, context: context.clone() })))
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_flow_action> {
        self.0.raw
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

/// Part of a flow: a spec, or an object that a spec refers to.
#[derive(Clone, Debug)]
enum Part {
    Spec(Spec),
    Action(FlowAction),
    Count(Counters),
}

/// Description of a flow rule, for [`FlowRule::new`].
///
/// ```
/// use wirepath_verbs::flow::{EthFilter, Flow, Ipv4Filter, Spec, UdpFilter};
///
/// let to_us = EthFilter { dst_mac: [2, 0, 0, 0, 0, 1], ..EthFilter::default() };
/// let whole = EthFilter { dst_mac: [0xff; 6], ..EthFilter::default() };
/// let flow = Flow::normal(1, 3).with(to_us.with_mask(whole)).with(Ipv4Filter::any()).with(UdpFilter::any());
/// let flow = flow.with(Spec::Tag(7));
/// ```
#[derive(Clone, Debug)]
pub struct Flow {
    attr: FlowAttr,
    parts: Vec<Part>,
}

impl Flow {
    /// Creates a flow without specs.
    pub fn new(attr: FlowAttr) -> Self {
        Self { attr, parts: Vec::new() }
    }

    /// Creates a flow of frames that `port` (counted from 1) receives and that match its specs.
    ///
    /// A flow with a smaller `priority` takes precedence. mlx5 supports priorities up to 15 (up to 7 before Linux
    /// 5.7), and places a flow that matches only multicast addresses after all others.
    pub fn normal(port: u8, priority: u16) -> Self {
        Self::new(FlowAttr { flow_type: FlowType::NORMAL, priority, port, flags: 0 })
    }

    /// Creates a flow of a type that needs no specs: [`FlowType::ALL_DEFAULT`], [`FlowType::MC_DEFAULT`],
    /// [`FlowType::SNIFFER`].
    pub fn without_specs(port: u8, flow_type: FlowType) -> Self {
        Self::new(FlowAttr { flow_type, priority: 0, port, flags: 0 })
    }

    /// Adds a spec. Specs may be in any order, but the MPLS spec must be at its position in the packet.
    ///
    /// [`FlowRule::new`] rejects [`Spec::Handle`] and [`Spec::Count`]: add their objects with [`Self::action`] and
    /// [`Self::count`].
    #[must_use]
    pub fn with(mut self, spec: Spec) -> Self {
        self.parts.push(Part::Spec(spec));
        self
    }

    /// Adds an action of the provider.
    #[must_use]
    pub fn action(mut self, action: impl Into<FlowAction>) -> Self {
        self.parts.push(Part::Action(action.into()));
        self
    }

    /// Adds counters.
    #[must_use]
    pub fn count(mut self, counters: &Counters) -> Self {
        self.parts.push(Part::Count(counters.clone()));
        self
    }

    /// Returns the specs, with the addresses of their objects, after checking the flow.
    fn specs(&self, context: &Context) -> std::result::Result<Vec<Spec>, String> {
        let same = |other: &Context| {
            if Arc::ptr_eq(&other.inner, &context.inner) {
                return Ok(());
            }
            Err(format!("a flow of {} contains objects of {}", context.inner.device_name(), other.inner.device_name()))
        };
        if self.parts.len() > MAX_SPECS {
            return Err(format!("a flow of {} specs; the maximum is {MAX_SPECS}", self.parts.len()));
        }
        if self.attr.flags & DONT_TRAP != 0 && self.attr.flow_type != FlowType::NORMAL {
            return Err("only a normal flow may pass packets on to flows of lower priority".to_owned());
        }
        self.parts
            .iter()
            .map(|part| match part {
                Part::Spec(Spec::Handle(_) | Spec::Count(_)) => {
                    Err("a flow takes actions and counters as objects, not as handles in a spec".to_owned())
                }
                Part::Spec(Spec::Tag(tag)) if *tag >> TAG_BITS != 0 => {
                    Err(format!("flow tag {tag} has more than {TAG_BITS} bits"))
                }
                Part::Spec(spec) => Ok(*spec),
                Part::Action(action) => {
                    same(action.context())?;
                    Ok(Spec::Handle(action.raw().as_ptr().expose_provenance() as u64))
                }
                Part::Count(counters) => {
                    same(&counters.0.context)?;
                    Ok(Spec::Count(counters.0.raw.as_ptr().expose_provenance() as u64))
                }
            })
            .collect()
    }
}

/// Flow rule. It is active until it is dropped, and keeps its queue pair, actions and counters alive.
#[derive(Debug)]
pub struct FlowRule {
    raw: NonNull<ibv_flow>,
    context: Context,
    _target: FlowTarget,
    _parts: Vec<Part>,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for FlowRule {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for FlowRule {}

impl Drop for FlowRule {
    fn drop(&mut self) {
        // SAFETY: the rule is alive and is destroyed once.
        let result = unsafe { ibv_destroy_flow(self.raw.as_ptr()) };
        self.context.inner.check_destroyed("ibv_destroy_flow", Ok(result), || None);
    }
}

impl FlowRule {
    /// Creates a rule that directs the frames of `flow` to `target`, unless the flow drops them. For an egress flow,
    /// `target` only selects the device.
    ///
    /// # Errors
    /// The flow is not valid: too many specs, objects of another device, or a tag of more than 24 bits. Or the device
    /// rejects it: `CAP_NET_RAW` is missing, the headers cannot be matched, or the priority is too large.
    pub fn new(target: impl Into<FlowTarget>, flow: &Flow) -> Result<Self> {
        let target = target.into();
        let context = target.domain().context.clone();
        let specs = flow.specs(&context).map_err(Error::InvalidRequest)?;
        let mut bytes = encode(&flow.attr, &specs);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        // The structure at the start needs the alignment of a u64.
        let mut words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        // SAFETY: the queue pair is alive. `words` contains an aligned `ibv_flow_attr` followed by its specs
        // (ibv_create_flow(3)), with the sizes of these specs. Pointers in them refer to living objects of the same
        // context.
        let raw = unsafe { ibv_create_flow(target.raw().as_ptr(), words.as_mut_ptr().cast()) };
        let raw = context.inner.check_created("ibv_create_flow", raw, Some(flow.attr.port))?;
        Ok(Self { raw, context, _target: target, _parts: flow.parts.clone() })
    }
}
