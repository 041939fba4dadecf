//! Commands and replies, independent of the form.

use wirepath_nic_defs::uverbs::{ioctl, write};

use crate::device::QpCap;
use crate::rules::{NewMatchedFlow, NewMatcher};

/// A uverbs command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of the structures in wirepath_nic_defs::uverbs::write")]
pub enum Request {
    GetContext,
    QueryContext,
    QueryDevice,
    QueryDeviceExtended,
    QueryPort {
        port: u8,
    },
    QueryGidTable {
        entry_size: u64,
    },
    QueryGidEntry {
        port: u32,
        index: u32,
    },
    AllocAsyncEvents,
    AllocPd,
    DeallocPd {
        pd: u32,
    },
    RegMr {
        pd: u32,
        start: u64,
        length: u64,
        iova: u64,
        access: u32,
    },
    DeregMr {
        mr: u32,
    },
    QueryMr {
        mr: u32,
    },
    QueryPd {
        pd: u32,
    },
    CreateCompChannel,
    CreateCq {
        user_handle: u64,
        cqe: u32,
        vector: u32,
        channel: Option<i32>,
        flags: u32,
    },
    DestroyCq {
        cq: u32,
    },
    ReqNotifyCq {
        cq: u32,
    },
    CreateQp(CreateQp),
    ModifyQp {
        qp: u32,
        mask: u32,
        state: u8,
        port: u8,
    },
    QueryQp {
        qp: u32,
    },
    DestroyQp {
        qp: u32,
    },
    CreateWq(CreateWq),
    ModifyWq {
        wq: u32,
        mask: u32,
        state: u32,
        current: u32,
        flags: u32,
        flags_mask: u32,
    },
    DestroyWq {
        wq: u32,
    },
    CreateIndirectionTable {
        wqs: Vec<u32>,
    },
    DestroyIndirectionTable {
        table: u32,
    },
    CreateFlow {
        qp: u32,
        attribute: [u8; 16],
        specs: Vec<u8>,
    },
    DestroyFlow {
        flow: u32,
    },
    CreateMatcher(NewMatcher),
    DestroyMatcher {
        matcher: u32,
    },
    /// Creates a rule of direct verbs; objects are named by handle.
    CreateMatchedFlow(NewMatchedFlow),
    CreateModifyHeader {
        table: u8,
        commands: Vec<u8>,
    },
    CreateReformat {
        kind: u8,
        table: u8,
        data: Option<Vec<u8>>,
    },
    DestroyFlowAction {
        action: u32,
    },
    CreateCounters,
    ReadCounters {
        counters: u32,
        count: usize,
    },
    DestroyCounters {
        counters: u32,
    },
    CreateFirmwareObject {
        command: Vec<u8>,
        room: usize,
    },
    QueryFirmwareObject {
        object: u32,
        command: Vec<u8>,
        room: usize,
    },
    ModifyFirmwareObject {
        object: u32,
        command: Vec<u8>,
        room: usize,
    },
    DestroyFirmwareObject {
        object: u32,
    },
    /// A driver-specific method or object. The device reads the attributes itself.
    Driver {
        object: u16,
        method: u16,
    },
}

/// Parameters of a new queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of wirepath_nic_defs::uverbs::write::CreateQp")]
pub struct CreateQp {
    pub user_handle: u64,
    pub pd: u32,
    pub send_cq: Option<u32>,
    pub recv_cq: Option<u32>,
    pub table: Option<u32>,
    pub kind: u32,
    pub flags: u32,
    pub cap: QpCap,
}

/// Parameters of a new work queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of wirepath_nic_defs::uverbs::write::CreateWq")]
pub struct CreateWq {
    pub user_handle: u64,
    pub pd: u32,
    pub cq: u32,
    pub kind: u32,
    pub max_wr: u32,
    pub max_sge: u32,
    pub flags: u32,
}

/// Reply of a command.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields are those of the structures in wirepath_nic_defs::uverbs::write")]
pub enum Reply {
    Empty,
    Context {
        async_fd: Option<i32>,
        vectors: u32,
    },
    Device(Box<write::ExtendedQueryDeviceReply>),
    Port(ioctl::QueryPortReply),
    GidTable(Vec<ioctl::GidEntry>),
    Descriptor(i32),
    Pd {
        pd: u32,
    },
    Mr {
        mr: u32,
        lkey: u32,
        rkey: u32,
    },
    PdInfo {
        number: u32,
    },
    MrInfo {
        lkey: u32,
        rkey: u32,
        length: u64,
    },
    Cq {
        cq: u32,
        cqe: u32,
    },
    /// Numbers of events that the application has read, for which the library waits: completion events and
    /// other events.
    EventCounts {
        completions: u32,
        others: u32,
    },
    Qp {
        qp: u32,
        number: u32,
        cap: QpCap,
    },
    Wq {
        wq: u32,
        max_wr: u32,
        max_sge: u32,
        number: u32,
    },
    IndirectionTable {
        table: u32,
        number: u32,
    },
    Flow {
        flow: u32,
    },
    /// Handle of a matcher, a flow action or a set of counters.
    Object {
        handle: u32,
    },
    Counters(Vec<u64>),
    /// The firmware's answer, and the handle if an object was created.
    Firmware {
        object: Option<u32>,
        answer: Vec<u8>,
    },
}

impl Request {
    /// Returns the name of the command, one of [`COMMANDS`](crate::faults::COMMANDS).
    pub fn name(&self) -> &'static str {
        match self {
            Self::GetContext => "get_context",
            Self::QueryContext => "query_context",
            Self::QueryDevice | Self::QueryDeviceExtended => "query_device",
            Self::QueryPort { .. } => "query_port",
            Self::QueryGidTable { .. } | Self::QueryGidEntry { .. } => "query_gid",
            Self::AllocAsyncEvents => "async_event",
            Self::AllocPd => "alloc_pd",
            Self::DeallocPd { .. } => "dealloc_pd",
            Self::RegMr { .. } => "reg_mr",
            Self::DeregMr { .. } => "dereg_mr",
            Self::QueryMr { .. } => "query_mr",
            Self::QueryPd { .. } => "query_pd",
            Self::CreateCompChannel => "create_comp_channel",
            Self::CreateCq { .. } => "create_cq",
            Self::DestroyCq { .. } => "destroy_cq",
            Self::ReqNotifyCq { .. } => "req_notify_cq",
            Self::CreateQp(_) => "create_qp",
            Self::ModifyQp { .. } => "modify_qp",
            Self::QueryQp { .. } => "query_qp",
            Self::DestroyQp { .. } => "destroy_qp",
            Self::CreateWq(_) => "create_wq",
            Self::ModifyWq { .. } => "modify_wq",
            Self::DestroyWq { .. } => "destroy_wq",
            Self::CreateIndirectionTable { .. } => "create_rwq_ind_table",
            Self::DestroyIndirectionTable { .. } => "destroy_rwq_ind_table",
            Self::CreateFlow { .. } | Self::CreateMatchedFlow(_) => "create_flow",
            Self::DestroyFlow { .. } => "destroy_flow",
            Self::CreateMatcher(_) => "create_matcher",
            Self::DestroyMatcher { .. } => "destroy_matcher",
            Self::CreateModifyHeader { .. } | Self::CreateReformat { .. } => "create_flow_action",
            Self::DestroyFlowAction { .. } => "destroy_flow_action",
            Self::CreateCounters => "create_counters",
            Self::ReadCounters { .. } => "read_counters",
            Self::DestroyCounters { .. } => "destroy_counters",
            Self::CreateFirmwareObject { .. } => "create_firmware_object",
            Self::QueryFirmwareObject { .. } => "query_firmware_object",
            Self::ModifyFirmwareObject { .. } => "modify_firmware_object",
            Self::DestroyFirmwareObject { .. } => "destroy_firmware_object",
            Self::Driver { .. } => "driver",
        }
    }

    /// Returns true if the command may remove posted work from a queue.
    pub(crate) fn stops_queues(&self) -> bool {
        matches!(
            self,
            Self::ModifyQp { .. }
                | Self::DestroyQp { .. }
                | Self::ModifyWq { .. }
                | Self::DestroyWq { .. }
                | Self::DestroyCq { .. }
                | Self::ModifyFirmwareObject { .. }
                | Self::DestroyFirmwareObject { .. }
        )
    }
}
