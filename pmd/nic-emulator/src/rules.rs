//! What a NIC with flow rules offers to the kernel side ([`crate::uverbs`]): `ibv_create_flow`, and the steering of direct verbs.

use rustix::io::Errno;

use crate::device::{Call, ContextId, ObjectId};

/// Part of a rule of `ibv_create_flow`, as the kernel has read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlowSpec {
    /// Headers that a packet must have.
    Match {
        /// `IBV_FLOW_SPEC_*` without `IBV_FLOW_SPEC_INNER`.
        kind: u32,
        /// Of the packet in the tunnel.
        inner: bool,
        /// Filter, as long as the kernel's structure for the kind: what the caller left out is zero.
        value: Vec<u8>,
        /// Which bits of it count.
        mask: Vec<u8>,
    },
    /// Goes into the completion.
    Tag(u32),
    /// The packet is dropped.
    Drop,
    /// A flow action.
    Action(ObjectId),
    /// A set of counters.
    Count(ObjectId),
}

/// A rule of `ibv_create_flow`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFlow {
    /// Where packets go.
    pub qp: ObjectId,
    /// `IBV_FLOW_ATTR_*`.
    pub kind: u32,
    /// The smallest goes first.
    pub priority: u16,
    /// From 1.
    pub port: u8,
    /// `IBV_FLOW_ATTR_FLAGS_*`.
    pub flags: u32,
    /// Headers and actions.
    pub specs: Vec<FlowSpec>,
}

/// A matcher of direct verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMatcher {
    /// Match parameters: which bits count.
    pub mask: Vec<u8>,
    /// `MLX5_IB_FLOW_TYPE_*`.
    pub kind: u8,
    /// The smallest goes first.
    pub priority: u16,
    /// Parts of the parameters that are looked at.
    pub criteria: u8,
    /// Table, as [`wirepath_nic_defs::uverbs::mlx5::TABLE_NIC_RX`] and its sisters.
    pub table: u8,
    /// From 1.
    pub port: u8,
}

/// A rule of direct verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMatchedFlow {
    /// Mask, priority and table.
    pub matcher: ObjectId,
    /// Match parameters.
    pub value: Vec<u8>,
    /// Where packets go.
    pub qp: Option<ObjectId>,
    /// At most two flow actions.
    pub actions: Vec<ObjectId>,
    /// Goes into the completion.
    pub tag: Option<u32>,
    /// Flow counter of the firmware, and which of its bulk.
    pub counter: Option<(ObjectId, u32)>,
    /// `FLOW_DEFAULT_MISS`, `FLOW_DROP`.
    pub flags: u32,
}

/// A NIC with flow rules. What uses an object keeps it: the kernel side sees to that.
#[allow(clippy::missing_errors_doc, reason = "the kernel's errors: see the manual page of each call")]
pub trait FlowRules<H> {
    /// New rule of `ibv_create_flow`; the driver part of the call says what its counters count.
    fn create_flow(&mut self, call: &mut Call<'_, H>, flow: &NewFlow) -> Result<ObjectId, Errno>;

    /// New rule of direct verbs.
    fn create_matched_flow(&mut self, call: &mut Call<'_, H>, flow: &NewMatchedFlow) -> Result<ObjectId, Errno>;

    /// Rule of either kind gone.
    fn destroy_flow(&mut self, flow: ObjectId);

    /// New matcher.
    fn create_matcher(&mut self, call: &mut Call<'_, H>, matcher: &NewMatcher) -> Result<ObjectId, Errno>;

    /// Matcher gone.
    fn destroy_matcher(&mut self, matcher: ObjectId);

    /// New flow action that changes headers: commands of 8 bytes, for a table.
    fn create_modify_header(&mut self, call: &mut Call<'_, H>, table: u8, commands: &[u8]) -> Result<ObjectId, Errno>;

    /// New flow action that puts headers on or takes them off, for a table. `None`: no data was given, which is not the same as none.
    fn create_reformat(
        &mut self,
        call: &mut Call<'_, H>,
        kind: u8,
        table: u8,
        data: Option<&[u8]>,
    ) -> Result<ObjectId, Errno>;

    /// Flow action gone.
    fn destroy_action(&mut self, action: ObjectId);

    /// New set of counters.
    fn create_counters(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno>;

    /// Reads as many counters as `values` has, each added to what stands there.
    fn read_counters(&mut self, call: &mut Call<'_, H>, counters: ObjectId, values: &mut [u64]) -> Result<(), Errno>;

    /// Set of counters gone.
    fn destroy_counters(&mut self, counters: ObjectId);

    /// New firmware object: the answer has at most `room` bytes.
    fn create_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        command: &[u8],
        room: usize,
    ) -> Result<(ObjectId, Vec<u8>), Errno>;

    /// A question about a firmware object.
    fn query_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        object: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno>;

    /// Firmware object gone.
    fn destroy_firmware_object(&mut self, object: ObjectId);

    /// Firmware objects can be made by programs that open the device for them.
    fn has_firmware_objects(&self, context: ContextId) -> bool;
}
