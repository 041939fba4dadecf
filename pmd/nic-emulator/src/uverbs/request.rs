//! Commands and replies, whichever form they came in.

use wirepath_nic_defs::uverbs::{ioctl, write};

use crate::rules::{NewMatchedFlow, NewMatcher};

/// A command.
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
    /// Objects by handle.
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
    DestroyFirmwareObject {
        object: u32,
    },
    /// A method or object of the driver: the device reads the attributes itself.
    Driver {
        object: u16,
        method: u16,
    },
}

/// A queue pair to be made.
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

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are those of ibv_qp_cap")]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline: u32,
}

/// A work queue to be made.
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

/// What a command comes to.
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
    PdIs {
        number: u32,
    },
    MrIs {
        lkey: u32,
        rkey: u32,
        length: u64,
    },
    Cq {
        cq: u32,
        cqe: u32,
    },
    /// Events that were read, which the library waits for: completions, then others.
    Gone {
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
    /// A matcher, a flow action, or a set of counters.
    Object {
        handle: u32,
    },
    Counters(Vec<u64>),
    /// The firmware's answer, and the object if there is a new one.
    Firmware {
        object: Option<u32>,
        answer: Vec<u8>,
    },
}

/// Names of commands, for faults on order.
pub const COMMANDS: &[&str] = &[
    "get_context",
    "query_context",
    "query_device",
    "query_port",
    "query_gid",
    "async_event",
    "alloc_pd",
    "dealloc_pd",
    "reg_mr",
    "dereg_mr",
    "query_mr",
    "query_pd",
    "create_comp_channel",
    "create_cq",
    "destroy_cq",
    "req_notify_cq",
    "create_qp",
    "modify_qp",
    "query_qp",
    "destroy_qp",
    "create_wq",
    "modify_wq",
    "destroy_wq",
    "create_rwq_ind_table",
    "destroy_rwq_ind_table",
    "create_flow",
    "destroy_flow",
    "create_matcher",
    "destroy_matcher",
    "create_flow_action",
    "destroy_flow_action",
    "create_counters",
    "read_counters",
    "destroy_counters",
    "create_firmware_object",
    "query_firmware_object",
    "destroy_firmware_object",
    "driver",
];

impl Request {
    /// Name of the command, one of [`COMMANDS`].
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
            Self::DestroyFirmwareObject { .. } => "destroy_firmware_object",
            Self::Driver { .. } => "driver",
        }
    }

    /// Whether the command may take from a queue what it has to do.
    pub(crate) fn stops_queues(&self) -> bool {
        matches!(
            self,
            Self::ModifyQp { .. }
                | Self::DestroyQp { .. }
                | Self::ModifyWq { .. }
                | Self::DestroyWq { .. }
                | Self::DestroyCq { .. }
        )
    }

    /// Whether the command takes something away: such commands may not fail for reasons of their own.
    pub fn destroys(&self) -> bool {
        self.name().starts_with("de")
    }
}
