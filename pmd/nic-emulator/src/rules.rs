//! The interface of a NIC with flow rules to the kernel side ([`crate::uverbs`]): `ibv_create_flow` and the
//! steering of direct verbs.

use rustix::io::Errno;

use crate::call::{Call, ContextId, ObjectId};

/// An element of an `ibv_create_flow` rule, as decoded by the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlowSpec {
    /// Matches header fields.
    Match {
        /// Kind of header, `IBV_FLOW_SPEC_*` without `IBV_FLOW_SPEC_INNER`.
        kind: u32,
        /// True for a header of the packet inside the tunnel.
        inner: bool,
        /// Values in the layout of the kernel's filter structure. Fields that the caller omitted are zero.
        value: Vec<u8>,
        /// Mask of the values, of the same length.
        mask: Vec<u8>,
    },
    /// Sets the flow tag of the completion.
    Tag(u32),
    /// Drops the packet.
    Drop,
    /// Applies a flow action.
    Action(ObjectId),
    /// Counts in a set of counters.
    Count(ObjectId),
}

/// A new rule of `ibv_create_flow`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFlow {
    /// Destination queue pair.
    pub qp: ObjectId,
    /// `IBV_FLOW_ATTR_*`.
    pub kind: u32,
    /// Priority; the smallest number is matched first.
    pub priority: u16,
    /// Port number, from 1.
    pub port: u8,
    /// `IBV_FLOW_ATTR_FLAGS_*`.
    pub flags: u32,
    /// Matches and actions.
    pub specs: Vec<FlowSpec>,
}

/// A new matcher of direct verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMatcher {
    /// Mask of the match parameters.
    pub mask: Vec<u8>,
    /// `MLX5_IB_FLOW_TYPE_*`.
    pub kind: u8,
    /// Priority; the smallest number is matched first.
    pub priority: u16,
    /// Parts of the match parameters that are compared, as bits of `match_criteria_enable`.
    pub criteria: u8,
    /// Flow table, such as [`wirepath_nic_defs::uverbs::mlx5::TABLE_NIC_RX`].
    pub table: u8,
    /// Port number, from 1.
    pub port: u8,
}

/// A new rule of direct verbs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewMatchedFlow {
    /// Matcher, which determines mask, priority and table.
    pub matcher: ObjectId,
    /// Values of the match parameters.
    pub value: Vec<u8>,
    /// Destination queue pair.
    pub qp: Option<ObjectId>,
    /// Destination transport interface (TIR), a firmware object.
    pub interface: Option<ObjectId>,
    /// Flow actions, at most two.
    pub actions: Vec<ObjectId>,
    /// Flow tag of the completion.
    pub tag: Option<u32>,
    /// Flow counter of the firmware: the bulk object, and the index in the bulk.
    pub counter: Option<(ObjectId, u32)>,
    /// Flags, `FLOW_DEFAULT_MISS` and `FLOW_DROP`.
    pub flags: u32,
}

/// The interface of a NIC with flow rules, which may count in firmware objects. The kernel side destroys an object
/// only when no other object uses it.
#[allow(clippy::missing_errors_doc, reason = "the kernel's errors: see the manual page of each call")]
pub trait FlowRules<H>: FirmwareObjects<H> {
    /// Creates a rule of `ibv_create_flow`. The driver part of the call describes its counters.
    fn create_flow(&mut self, call: &mut Call<'_, H>, flow: &NewFlow) -> Result<ObjectId, Errno>;

    /// Creates a rule of direct verbs.
    fn create_matched_flow(&mut self, call: &mut Call<'_, H>, flow: &NewMatchedFlow) -> Result<ObjectId, Errno>;

    /// Destroys a rule of either kind.
    fn destroy_flow(&mut self, flow: ObjectId);

    /// Creates a matcher.
    fn create_matcher(&mut self, call: &mut Call<'_, H>, matcher: &NewMatcher) -> Result<ObjectId, Errno>;

    /// Destroys a matcher.
    fn destroy_matcher(&mut self, matcher: ObjectId);

    /// Creates a header-modification action for a table, from commands of 8 bytes.
    fn create_modify_header(&mut self, call: &mut Call<'_, H>, table: u8, commands: &[u8]) -> Result<ObjectId, Errno>;

    /// Creates a packet-reformat action for a table. `data` is `None` if the attribute is missing, which
    /// differs from empty data.
    fn create_reformat(
        &mut self,
        call: &mut Call<'_, H>,
        kind: u8,
        table: u8,
        data: Option<&[u8]>,
    ) -> Result<ObjectId, Errno>;

    /// Destroys a flow action.
    fn destroy_action(&mut self, action: ObjectId);

    /// Creates a set of counters.
    fn create_counters(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno>;

    /// Reads `values.len()` counters and adds them to `values`.
    fn read_counters(&mut self, call: &mut Call<'_, H>, counters: ObjectId, values: &mut [u64]) -> Result<(), Errno>;

    /// Destroys a set of counters.
    fn destroy_counters(&mut self, counters: ObjectId);
}

/// Objects of firmware commands (DevX). The kernel side refers to an object by the number that its creation returned.
#[allow(clippy::missing_errors_doc, reason = "the kernel's errors: see `mlx5dv_devx_obj_create(3)`")]
pub trait FirmwareObjects<H> {
    /// Creates a firmware object; returns its number and the firmware's answer of at most `room` bytes.
    fn create_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        command: &[u8],
        room: usize,
    ) -> Result<(ObjectId, Vec<u8>), Errno>;

    /// Queries a firmware object; returns the firmware's answer of at most `room` bytes.
    fn query_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        object: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno>;

    /// Queries a queue pair by a firmware command; returns the firmware's answer of at most `room` bytes.
    fn query_queue_pair(
        &mut self,
        call: &mut Call<'_, H>,
        qp: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno>;

    /// Changes a firmware object; returns the firmware's answer of at most `room` bytes.
    fn modify_firmware_object(
        &mut self,
        call: &mut Call<'_, H>,
        object: ObjectId,
        command: &[u8],
        room: usize,
    ) -> Result<Vec<u8>, Errno>;

    /// Returns an error while other objects use a firmware object.
    fn firmware_object_is_free(&self, call: &Call<'_, H>, object: ObjectId) -> Result<(), Errno>;

    /// Destroys a firmware object.
    fn destroy_firmware_object(&mut self, object: ObjectId);

    /// Returns true if the context was opened for firmware commands, so that firmware objects can be created.
    fn has_firmware_objects(&self, context: ContextId) -> bool;
}
