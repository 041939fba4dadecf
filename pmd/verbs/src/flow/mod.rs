// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Flow rules (ibv_create_flow(3)): which frames of a port reach a queue pair, and what else becomes of them.

mod counters;
mod spec;

#[cfg(test)]
mod tests;

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;

pub use self::counters::{Counted, Counters};
pub use self::spec::*;
use crate::domain::DomainInner;
use crate::{Context, Error, RawPacketQp, Result, RssQp};

/// Bits of a mark.
pub const TAG_BITS: u32 = 24;

/// Where packets go.
#[derive(Clone, Debug)]
pub enum FlowTarget {
    /// Spread over queues.
    Rss(RssQp),
    /// To the receive queue of a pair.
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

/// An action that a provider made (`struct ibv_flow_action`): on mlx5 a packet reformat or a header modification.
#[derive(Debug)]
pub(crate) struct FlowActionInner {
    raw: NonNull<ibv_flow_action>,
    context: Context,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for FlowActionInner {}
// SAFETY: as above.
unsafe impl Sync for FlowActionInner {}

impl Drop for FlowActionInner {
    fn drop(&mut self) {
        // SAFETY: made by a creation, dropped once; flows kept it alive.
        let result = unsafe { ibv_destroy_flow_action(self.raw.as_ptr()) };
        self.context.inner.destroyed("ibv_destroy_flow_action", Ok(result), || None);
    }
}

/// An action that a provider made, for [`Flow::action`]. Clones are the same one.
#[derive(Clone, Debug)]
pub struct FlowAction(Arc<FlowActionInner>);

impl FlowAction {
    /// Takes over what a creation returned.
    ///
    /// # Safety
    /// A new action of this context, or null with errno set.
    pub(crate) unsafe fn adopt(context: &Context, call: &'static str, raw: *mut ibv_flow_action) -> Result<Self> {
        let raw = context.inner.created(call, raw, None)?;
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

/// A part of a flow: a spec, or one that points to an object.
#[derive(Clone, Debug)]
enum Part {
    Spec(Spec),
    Action(FlowAction),
    Count(Counters),
}

/// A flow to be: what [`FlowRule::new`] puts in force.
///
/// ```
/// use wirepath_verbs::flow::{EthFilter, Flow, Ipv4Filter, Spec, UdpFilter};
///
/// let to_us = EthFilter { dst_mac: [2, 0, 0, 0, 0, 1], ..EthFilter::default() };
/// let whole = EthFilter { dst_mac: [0xff; 6], ..EthFilter::default() };
/// let flow = Flow::normal(1, 3).with(to_us.under(whole)).with(Ipv4Filter::any()).with(UdpFilter::any()).with(Spec::Tag(7));
/// ```
#[derive(Clone, Debug)]
pub struct Flow {
    attr: FlowAttr,
    parts: Vec<Part>,
}

impl Flow {
    /// A flow without specs.
    pub fn new(attr: FlowAttr) -> Self {
        Self { attr, parts: Vec::new() }
    }

    /// A flow of frames that `port` (counted from 1) receives and that fit its specs, if no flow with a smaller `priority` has them. mlx5
    /// knows priorities to 15 (to 7 before Linux 5.7), and puts a flow for group addresses alone behind all others.
    pub fn normal(port: u8, priority: u16) -> Self {
        Self::new(FlowAttr { flow_type: FlowType::NORMAL, priority, port, flags: 0 })
    }

    /// A flow of this type that needs no specs: [`FlowType::ALL_DEFAULT`], [`FlowType::MC_DEFAULT`], [`FlowType::SNIFFER`].
    pub fn of(port: u8, flow_type: FlowType) -> Self {
        Self::new(FlowAttr { flow_type, priority: 0, port, flags: 0 })
    }

    /// One spec more. Specs may be in any order, but MPLS stands at its true place. [`Spec::Handle`] and [`Spec::Count`] are refused
    /// by [`FlowRule::new`]: what is behind their numbers comes through [`Self::action`] and [`Self::count`].
    #[must_use]
    pub fn with(mut self, spec: Spec) -> Self {
        self.parts.push(Part::Spec(spec));
        self
    }

    /// A provider's action.
    #[must_use]
    pub fn action(mut self, action: impl Into<FlowAction>) -> Self {
        self.parts.push(Part::Action(action.into()));
        self
    }

    /// Counts there.
    #[must_use]
    pub fn count(mut self, counters: &Counters) -> Self {
        self.parts.push(Part::Count(counters.clone()));
        self
    }

    /// The specs with the addresses of the objects in them, if all of that can be asked for.
    fn specs(&self, context: &Context) -> std::result::Result<Vec<Spec>, String> {
        let same = |other: &Context| {
            if Arc::ptr_eq(&other.inner, &context.inner) {
                return Ok(());
            }
            Err(format!("a flow of {} with objects of {}", context.inner.device_name(), other.inner.device_name()))
        };
        if self.parts.len() > MAX_SPECS {
            return Err(format!("a flow of {} specs; there are at most {MAX_SPECS}", self.parts.len()));
        }
        if self.attr.flags & DONT_TRAP != 0 && self.attr.flow_type != FlowType::NORMAL {
            return Err("only a normal flow lets packets go on to later flows".to_owned());
        }
        self.parts
            .iter()
            .map(|part| match part {
                Part::Spec(Spec::Handle(_) | Spec::Count(_)) => {
                    Err("an object of a flow must be handed over, not its number".to_owned())
                }
                Part::Spec(Spec::Tag(tag)) if *tag >> TAG_BITS != 0 => {
                    Err(format!("mark {tag} has more than {TAG_BITS} bits"))
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

/// A flow that is in force until it is dropped. Keeps its queue pair, actions and counters.
#[derive(Debug)]
pub struct FlowRule {
    raw: NonNull<ibv_flow>,
    context: Context,
    _target: FlowTarget,
    _parts: Vec<Part>,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for FlowRule {}
// SAFETY: as above.
unsafe impl Sync for FlowRule {}

impl Drop for FlowRule {
    fn drop(&mut self) {
        // SAFETY: made by a creation, dropped once.
        let result = unsafe { ibv_destroy_flow(self.raw.as_ptr()) };
        self.context.inner.destroyed("ibv_destroy_flow", Ok(result), || None);
    }
}

impl FlowRule {
    /// Has the frames of `flow` go to `target`, unless it drops them. Of an egress flow, `target` only names the device.
    ///
    /// # Errors
    /// The flow cannot be asked for (too many specs, objects of another device, a mark of more than 24 bits), or the device refused:
    /// `CAP_NET_RAW` is missing, the headers cannot be matched, or the priority is too large.
    pub fn new(target: impl Into<FlowTarget>, flow: &Flow) -> Result<Self> {
        let target = target.into();
        let context = target.domain().context.clone();
        let specs = flow.specs(&context).map_err(Error::Request)?;
        let mut bytes = encode(&flow.attr, &specs);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        // Aligned as the structure at its start wants it.
        let mut words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        // SAFETY: a living queue pair; a flow as ibv_create_flow(3) wants it, whose sizes are those of its specs and whose pointers are
        // living objects of the same context.
        let raw = unsafe { ibv_create_flow(target.raw().as_ptr(), words.as_mut_ptr().cast()) };
        let raw = context.inner.created("ibv_create_flow", raw, Some(flow.attr.port))?;
        Ok(Self { raw, context, _target: target, _parts: flow.parts.clone() })
    }
}
