// UNSAFETY: calls libhbl and libibverbs.
#![allow(unsafe_code)]

//! Direct verbs of Habana / Intel Gaudi (hbldv): reliable queue pairs whose packets the NIC puts into a tunnel.
//!
//! The tunnel is a property of a queue pair, not of a flow: the sender puts a header of at most 32 bytes behind IPv4 (and UDP) in front of
//! each RDMA packet, the receiving port takes it off. The orders that the kernel's driver wants hold by type:
//!
//! - A [`Port`] comes of [`Hbl::set_up_port`] only, and encapsulations, completion queues and queue pairs come of a port.
//! - A queue pair takes its [`Encap`] on the way to [`Receiving`], keeps it, and says it again on the way to [`Sending`], because the kernel
//!   reads it in both transitions and remembers nothing in between. So no encapsulation is destroyed before its queue pairs: the kernel
//!   would not notice.
//! - An encapsulation is of the port of its queue pair: nothing below checks that.
//!
//! No distribution packages libhbl, and its provider is part of no released rdma-core: it is loaded if it is there
//! ([`crate::Verbs::libraries`]). Sources: the proposed provider (`providers/hbl`), hbldv_create_encap(3), and the kernel driver
//! (HabanaAI/drivers.gpu.linux-nic.kernel).

mod encap;
mod queue_pair;

use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

pub use encap::{Encap, EncapKind, EncapProblem, Encapsulation, MAX_ENCAP_HEADER};
pub use queue_pair::{
    Created, Initialized, Peer, QueuePair, QueuePairOptions, Receiving, Requester, Responder, Sending, WorkQueueKind,
};
use rdma_core_sys::hbldv::*;

use crate::{CompletionQueue, CompletionQueueOptions, Context, Device, Error, Provider, Result};

/// An open Gaudi NIC.
#[derive(Clone, Debug)]
pub struct Hbl(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    context: Context,
    /// The accelerator's file, for as long as the NIC works for it.
    _core: OwnedFd,
}

/// What the device says of itself (`hbldv_query_device`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAbilities {
    /// Congestion control.
    pub congestion_control: bool,
    /// Bit n: port n, counted from 1.
    pub ports: u64,
}

/// How a port is set up (`hbldv_set_port_ex`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortSetup {
    /// Most work queues.
    pub work_queues: u32,
    /// Requests of each.
    pub requests: u32,
    /// Work queues lie in the accelerator's memory, not in the host's.
    pub in_device_memory: bool,
    /// Send requests of 64 bytes, not of 32.
    pub wide_requests: bool,
    /// Advanced features of the port.
    pub advanced: bool,
    /// Timeouts that follow what is measured.
    pub adaptive_timeout: bool,
}

impl PortSetup {
    /// Work queues in host memory, requests of 32 bytes.
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
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Entries of a completion queue.
    pub completions: u32,
    /// Completion queues.
    pub completion_queues: u8,
    /// Encapsulations at a time: on Gaudi 2 one.
    pub encaps: u8,
}

/// A port that was set up.
#[derive(Clone, Debug)]
pub struct Port {
    hbl: Hbl,
    number: u32,
}

/// A completion queue of a port.
#[derive(Clone, Debug)]
pub struct Completions {
    queue: CompletionQueue,
    port: u32,
}

impl Hbl {
    /// Opens a device for the accelerator whose open file is `core`, with the ports of the mask (bit n: port n, counted from 1; 0: all).
    ///
    /// # Errors
    /// There is no libhbl; it is another device; another process has it (`EBUSY`); ports that the device does not have (`EINVAL`).
    pub fn open(device: &Device, core: OwnedFd, ports: u64) -> Result<Self> {
        let library = device.verbs().libraries.hbl()?;
        let open = library.hbldv_open_device()?;
        let mut attr = hbldv_ucontext_attr { ports_mask: ports, core_fd: core.as_raw_fd() };
        // SAFETY: a device of a living list, and attributes that the library reads.
        let context = Context::open_by(device, "hbldv_open_device", |raw| unsafe { open(raw, &raw mut attr) })?;
        let found = context.provider();
        if found != Provider::Hbl {
            return Err(Error::Provider { device: device.name(), found, wanted: Provider::Hbl });
        }
        Ok(Self(Arc::new(Inner { context, _core: core })))
    }

    /// Whether libhbl drives a device.
    ///
    /// # Errors
    /// There is no libhbl.
    pub fn drives(device: &Device) -> Result<bool> {
        let is_supported = device.verbs().libraries.hbl()?.hbldv_is_supported()?;
        // SAFETY: a device of a living list.
        Ok(unsafe { is_supported(device.raw().as_ptr()) })
    }

    /// The open device, for protection domains: it has one.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    fn library(&self) -> Result<&'static Hbldv> {
        Ok(self.0.context.inner.libraries.hbl()?)
    }

    /// What the device can do.
    ///
    /// # Errors
    /// The query failed.
    pub fn abilities(&self) -> Result<DeviceAbilities> {
        const CONGESTION_CONTROL: u64 = 1;
        let query = self.library()?.hbldv_query_device()?;
        let mut attr = hbldv_device_attr::zeroed();
        let inner = &self.0.context.inner;
        // SAFETY: an open context of libhbl, and room for the answer.
        inner.done("hbldv_query_device", unsafe { query(inner.raw.as_ptr(), &raw mut attr) })?;
        Ok(DeviceAbilities { congestion_control: attr.caps & CONGESTION_CONTROL != 0, ports: attr.ports_mask })
    }

    /// Sets port `number`, counted from 1, up: before anything else of it.
    ///
    /// # Errors
    /// There is no such port among those that the device was opened with, or it takes no such set-up.
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
        // SAFETY: an open context of libhbl; the kernel reads the attributes during the call.
        inner.done("hbldv_set_port_ex", unsafe { set(inner.raw.as_ptr(), &raw mut attr) })?;
        Ok(Port { hbl: self.clone(), number })
    }
}

impl Port {
    /// Its number, counted from 1.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The device.
    pub fn device(&self) -> &Hbl {
        &self.hbl
    }

    fn same(&self, what: &str, other: &Hbl, port: u32) -> Result<()> {
        if Arc::ptr_eq(&self.hbl.0, &other.0) && self.number == port {
            return Ok(());
        }
        let name = self.hbl.context().inner.device_name();
        Err(Error::Request(format!("{what} is of port {port}, not of port {} of {name}", self.number)))
    }

    /// What the port can have.
    ///
    /// # Errors
    /// The query failed.
    pub fn limits(&self) -> Result<PortLimits> {
        let query = self.hbl.library()?.hbldv_query_port()?;
        let mut attr = hbldv_query_port_attr::zeroed();
        let inner = &self.hbl.context().inner;
        // SAFETY: an open context of libhbl, and room for the answer.
        inner.done("hbldv_query_port", unsafe { query(inner.raw.as_ptr(), self.number, &raw mut attr) })?;
        Ok(PortLimits {
            queue_pairs: attr.max_num_of_qps,
            completions: attr.max_cq_size,
            completion_queues: attr.max_num_of_cqs,
            encaps: attr.max_num_of_encaps,
        })
    }

    /// A completion queue of the port.
    ///
    /// # Errors
    /// The size is not possible, or the device refused.
    pub fn completions(&self, options: &CompletionQueueOptions) -> Result<Completions> {
        let create = self.hbl.library()?.hbldv_create_cq()?;
        let port_num = u8::try_from(self.number)
            .map_err(|_| Error::Request(format!("completion queues of port {} cannot be named", self.number)))?;
        let mut attr = hbldv_cq_attr { port_num, cq_type: HBLDV_CQ_TYPE_QP };
        let make = |context, entries: c_int, _user, channel, vector| {
            // SAFETY: an open context of libhbl; a channel of it, which the queue keeps. The user context cannot be given.
            unsafe { create(context, entries, channel, vector, &raw mut attr) }
        };
        let queue = CompletionQueue::with(self.hbl.context(), options, "hbldv_create_cq", make)?;
        Ok(Completions { queue, port: self.number })
    }
}
