// UNSAFETY: calls libhbl and libibverbs.
#![allow(unsafe_code)]

//! Direct verbs of Habana / Intel Gaudi (hbldv): reliable queue pairs whose packets the NIC encapsulates in a tunnel.
//!
//! The tunnel is a property of a queue pair, not of a flow. The sender inserts a header of at most 32 bytes before
//! each RDMA packet, after IPv4 (and UDP). The receiving port removes it. The types enforce the order of calls that
//! the kernel driver requires:
//!
//! - Only [`Hbl::set_up_port`] returns a [`Port`]. Encapsulations, completion queues and queue pairs are created from
//!   a port.
//! - A queue pair takes its [`Encap`] in the transition to [`ReadyToReceive`] and keeps it. It passes the encapsulation
//!   again in the transition to [`ReadyToSend`]. The kernel reads it in both transitions and does not store it.
//! - A queue pair keeps its encapsulation alive. The kernel does not check that the encapsulation outlives the pair.
//! - An encapsulation belongs to the port of its queue pair. This crate checks that, because neither the library nor
//!   the kernel does.
//!
//! No distribution packages libhbl, and no released rdma-core contains its provider. It is loaded if it is installed
//! ([`crate::Verbs::libraries`]). Sources: the proposed provider (`providers/hbl`), hbldv_create_encap(3), and the
//! kernel driver (HabanaAI/drivers.gpu.linux-nic.kernel).

mod encap;
mod queue_pair;

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

pub use encap::{Encap, EncapConfig, EncapError, EncapKind, MAX_ENCAP_HEADER};
pub use queue_pair::{
    Created, Initialized, Peer, QueuePair, QueuePairOptions, ReadyToReceive, ReadyToSend, Requester, Responder,
    WorkQueueKind,
};
use rdma_core_sys::hbldv::*;

use crate::{CompletionQueue, CompletionQueueOptions, Context, Device, Error, Provider, Result};

/// Open Gaudi NIC.
#[derive(Clone, Debug)]
pub struct Hbl(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    /// File of the accelerator. It stays open while the NIC is in use.
    _core: OwnedFd,
}

/// Capabilities of a device (`hbldv_query_device`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCapabilities {
    /// True if congestion control is supported.
    pub congestion_control: bool,
    /// Mask of ports. Bit n is port n, counted from 1.
    pub ports: u64,
}

/// Configuration of a port (`hbldv_set_port_ex`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSetup {
    /// Maximum number of work queues.
    pub work_queues: u32,
    /// Number of requests in each work queue.
    pub requests: u32,
    /// True if work queues are in the memory of the accelerator, false if in host memory.
    pub in_device_memory: bool,
    /// True for send requests of 64 bytes, false for 32 bytes.
    pub wide_requests: bool,
    /// Enables advanced features of the port (`HBLDV_PORT_CAP_ADVANCED`).
    pub advanced: bool,
    /// Enables timeouts that adapt to measured round-trip times.
    pub adaptive_timeout: bool,
}

impl PortSetup {
    /// Creates a configuration with work queues in host memory and requests of 32 bytes.
    pub const fn new(work_queues: u32, requests: u32) -> Self {
        Self {
            work_queues,
            requests,
            in_device_memory: false,
            wide_requests: false,
            advanced: false,
            adaptive_timeout: false,
        }
    }
}

/// Limits of a port (`hbldv_query_port`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortLimits {
    /// Maximum number of queue pairs.
    pub queue_pairs: u32,
    /// Maximum number of entries in a completion queue.
    pub completions: u32,
    /// Maximum number of completion queues.
    pub completion_queues: u8,
    /// Maximum number of encapsulations at a time; 1 on Gaudi 2.
    pub encaps: u8,
}

/// Configured port.
#[derive(Clone, Debug)]
pub struct Port {
    hbl: Hbl,
    number: u32,
}

/// Completion queue of a port.
#[derive(Clone, Debug)]
pub struct PortCompletionQueue {
    queue: CompletionQueue,
    port: u32,
}

impl Hbl {
    /// Opens a device for the accelerator whose open file is `core`.
    ///
    /// `ports` is the mask of ports to use. Bit n is port n, counted from 1; a mask of 0 means all ports.
    ///
    /// # Errors
    /// libhbl is missing, the device is not a Gaudi, or another process has it open (`EBUSY`). Or the device does not
    /// have all of the ports (`EINVAL`).
    pub fn open(device: &Device, core: OwnedFd, ports: u64) -> Result<Self> {
        let library = device.verbs().libraries.hbl()?;
        let open = library.hbldv_open_device()?;
        let mut attr = hbldv_ucontext_attr { ports_mask: ports, core_fd: core.as_raw_fd() };
        // SAFETY: the device is alive, because `device` keeps its list. `attr` is valid during the call.
        let context = Context::open_with(device, "hbldv_open_device", |raw| unsafe { open(raw, &raw mut attr) })?;
        let found = context.provider();
        if found != Provider::Hbl {
            return Err(Error::Provider { device: device.name(), found, wanted: Provider::Hbl });
        }
        Ok(Self(Arc::new(Inner { context, _core: core })))
    }

    /// Returns true if libhbl supports a device.
    ///
    /// # Errors
    /// libhbl is missing.
    pub fn is_supported(device: &Device) -> Result<bool> {
        let is_supported = device.verbs().libraries.hbl()?.hbldv_is_supported()?;
        // SAFETY: the device is alive, because `device` keeps its list.
        Ok(unsafe { is_supported(device.raw().as_ptr()) })
    }

    /// Returns the context of the device. Protection domains are created in it.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    fn library(&self) -> Result<&'static Hbldv> {
        Ok(self.0.context.inner.libraries.hbl()?)
    }

    /// Queries the capabilities of the device.
    ///
    /// # Errors
    /// The query failed.
    pub fn capabilities(&self) -> Result<DeviceCapabilities> {
        const CONGESTION_CONTROL: u64 = 1;
        let query = self.library()?.hbldv_query_device()?;
        let mut attr = hbldv_device_attr::zeroed();
        let inner = &self.0.context.inner;
        // SAFETY: the context is open and belongs to libhbl, and `attr` is valid for the write of the call.
        inner.check("hbldv_query_device", unsafe { query(inner.raw.as_ptr(), &raw mut attr) })?;
        Ok(DeviceCapabilities { congestion_control: attr.caps & CONGESTION_CONTROL != 0, ports: attr.ports_mask })
    }

    /// Configures port `number`, counted from 1. This is the first call for a port.
    ///
    /// # Errors
    /// The device was not opened with this port, or it does not support the configuration.
    pub fn set_up_port(&self, number: u32, setup: &PortSetup) -> Result<Port> {
        let set = self.library()?.hbldv_set_port_ex()?;
        let mut attr = hbldv_port_ex_attr::zeroed();
        attr.wq_arr_attr[0] = hbldv_wq_array_attr {
            max_num_of_wqs: setup.work_queues,
            max_num_of_wqes_in_wq: setup.requests,
            mem_id: if setup.in_device_memory { HBLDV_MEM_DEVICE } else { HBLDV_MEM_HOST },
            swq_granularity: if setup.wide_requests { HBLDV_SWQE_GRAN_64B } else { HBLDV_SWQE_GRAN_32B },
        };
        attr.port_num = number;
        if setup.advanced {
            attr.caps |= HBLDV_PORT_CAP_ADVANCED;
        }
        if setup.adaptive_timeout {
            attr.caps |= HBLDV_PORT_CAP_ADAPTIVE_TIMEOUT;
        }
        let inner = &self.0.context.inner;
        // SAFETY: the context is open and belongs to libhbl, and the kernel reads `attr` during the call only.
        inner.check("hbldv_set_port_ex", unsafe { set(inner.raw.as_ptr(), &raw mut attr) })?;
        Ok(Port { hbl: self.clone(), number })
    }
}

impl Port {
    /// Returns the port number, counted from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the device.
    pub fn device(&self) -> &Hbl {
        &self.hbl
    }

    fn check_same_port(&self, what: &str, other: &Hbl, port: u32) -> Result<()> {
        if Arc::ptr_eq(&self.hbl.0, &other.0) && self.number == port {
            return Ok(());
        }
        let name = self.hbl.context().inner.device_name();
        Err(Error::InvalidRequest(format!("{what} belongs to port {port}, not to port {} of {name}", self.number)))
    }

    /// Queries the limits of the port.
    ///
    /// # Errors
    /// The query failed.
    pub fn limits(&self) -> Result<PortLimits> {
        let query = self.hbl.library()?.hbldv_query_port()?;
        let mut attr = hbldv_query_port_attr::zeroed();
        let inner = &self.hbl.context().inner;
        // SAFETY: the context is open and belongs to libhbl, and `attr` is valid for the write of the call.
        inner.check("hbldv_query_port", unsafe { query(inner.raw.as_ptr(), self.number, &raw mut attr) })?;
        Ok(PortLimits {
            queue_pairs: attr.max_num_of_qps,
            completions: attr.max_cq_size,
            completion_queues: attr.max_num_of_cqs,
            encaps: attr.max_num_of_encaps,
        })
    }

    /// Creates a completion queue of the port.
    ///
    /// # Errors
    /// The size is not valid, or the device cannot create the queue.
    pub fn completion_queue(&self, options: &CompletionQueueOptions) -> Result<PortCompletionQueue> {
        let create = self.hbl.library()?.hbldv_create_cq()?;
        let port_num = u8::try_from(self.number).map_err(|_| {
            Error::InvalidRequest(format!(
                "port {} has a number of more than 8 bits; completion queues need 8",
                self.number
            ))
        })?;
        let mut attr = hbldv_cq_attr { port_num, cq_type: HBLDV_CQ_TYPE_QP };
        let make = |context, entries: c_int, _user, channel, vector| {
            // SAFETY: the context is open and belongs to libhbl. The channel is alive: the queue keeps it. The call
            // takes no user context.
            unsafe { create(context, entries, channel, vector, &raw mut attr) }
        };
        let queue = CompletionQueue::create_with(self.hbl.context(), options, "hbldv_create_cq", make)?;
        Ok(PortCompletionQueue { queue, port: self.number })
    }
}
