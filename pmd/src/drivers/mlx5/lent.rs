//! Queues of an mlx5 in another process: it imports the device, and maps the page of registers that the queue's doorbells are in.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::DeviceMemory;
use wirepath_verbs::mlx5::var::{ImportedVar, Var, VarKind};
use wirepath_verbs::mlx5::{Mlx5, PAGE_BYTES};
use wirepath_verbs::{Context, Fate, Result, Verbs};

use super::nic::{MAX_DEPTH, MAX_MTU, Mlx5Nic, Opened, Placed};
use super::rx::{Layout, ReceiveMode, ReceivePlace, ReceiveRing};
use super::tx::{self, SendMode, SendPlace, SendRing};
use super::wqe::{MAX_BLUE_FLAME, MAX_INLINE};
use crate::drivers::direct::attach::{At, Borrow, Lend, Lent, Views};
use crate::drivers::direct::device::Parts;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::longest_frame;
use crate::drivers::direct::opened::odd_ring;
use crate::drivers::direct::receive::{PoolDry, Spread};
use crate::drivers::direct::registered::{Registered, Sink};
use crate::packet::MAX_PACKET;
use crate::port::PortConfig;

/// Bytes of a pair of doorbell records.
const RECORDS: usize = 8;

/// What all queues have in common.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Common {
    mtu: u16,
    /// Packets of a send ring.
    depth: u32,
    send: SendMode,
    receive: ReceiveMode,
    sink: Sink,
}

/// Where the registers of a send queue are: the page in the device, offset in the page, and bytes of a BlueFlame buffer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Registers {
    pub(super) at: u64,
    pub(super) register: usize,
    pub(super) blue_flame: usize,
}

/// Where a send queue lies.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SendAt {
    ring: At,
    records: At,
    completions: At,
    completion_records: At,
    number: u32,
    registers: Registers,
}

/// Where a receive queue lies.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReceiveAt {
    ring: At,
    records: At,
    entries: u32,
    stride: u32,
    completions: At,
    completion_records: At,
}

/// Where memory of a queue lies.
fn place(opened: &Opened, memory: &DeviceMemory) -> Result<At> {
    opened.at(memory).ok_or_else(|| odd_ring("a queue of another process"))
}

/// A receive queue for another process.
pub(super) fn receive(opened: &Opened, queue: ReceivePlace, fate: Fate) -> Result<Lent<ReceiveAt>> {
    let at = ReceiveAt {
        ring: place(opened, &queue.ring)?,
        records: place(opened, &queue.records)?,
        entries: queue.entries,
        stride: queue.stride,
        completions: place(opened, &queue.completions)?,
        completion_records: place(opened, &queue.completion_records)?,
    };
    Ok(Lent { keep: Box::new(queue), fate, at })
}

impl Lend for Mlx5Nic {
    type Common = Common;
    type SendAt = SendAt;
    type Visitor = Mlx5;

    fn common(&self, memory: &Registered, config: &PortConfig) -> Common {
        Common {
            mtu: config.mtu,
            depth: self.send_depth(config),
            send: self.modes.send,
            receive: self.modes.receive(config),
            sink: memory.sink,
        }
    }

    fn lend_send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Lent<SendAt>> {
        let owner = usize::from(parts.config.tx_queues) + index;
        let Placed { place: queue, fate, registers, .. } = self.send_place(parts, owner)?;
        let at = |memory: &DeviceMemory| place(parts.opened, memory);
        let at = SendAt {
            ring: at(&queue.ring)?,
            records: at(&queue.records)?,
            completions: at(&queue.completions)?,
            completion_records: at(&queue.completion_records)?,
            number: queue.number,
            registers,
        };
        Ok(Lent { keep: Box::new(queue), fate, at })
    }

    fn lkey(memory: &Registered) -> u32 {
        memory.keys.home().lkey()
    }

    fn registration(memory: &Registered) -> Option<u32> {
        Some(memory.handle)
    }

    fn var(mlx5: &Mlx5) -> Result<Var> {
        // Without export a page would be of no use to anybody.
        mlx5.exports_vars()?;
        Var::new(mlx5, VarKind::Virtio)
    }

    fn import_var(mlx5: &Mlx5, bytes: &[u8], lease: &OwnedFd) -> Result<ImportedVar> {
        ImportedVar::new(mlx5, bytes, lease)
    }

    fn visit(device: OwnedFd) -> Result<(Mlx5, Option<Context>)> {
        let context = Verbs::load()?.import_device(device)?;
        Ok((Mlx5::of(&context)?, Some(context)))
    }

    fn borrow_send(
        mlx5: &Mlx5,
        common: &Common,
        at: &SendAt,
        views: &Views,
        keys: &Arc<Keys>,
        ending: Ending,
    ) -> Result<Option<SendRing>> {
        let Registers { at: page, register, blue_flame } = at.registers;
        let within = register.is_multiple_of(8)
            && blue_flame.is_multiple_of(8)
            && register <= PAGE_BYTES
            && blue_flame <= PAGE_BYTES
            && register + 2 * blue_flame.max(8) <= PAGE_BYTES;
        let (Some(ring), Some(records), Some(completions), Some(completion_records)) = (
            views.of(at.ring, None),
            views.of(at.records, Some(RECORDS)),
            views.of(at.completions, None),
            views.of(at.completion_records, Some(RECORDS)),
        ) else {
            return Ok(None);
        };
        if !within || !common.is_sound() {
            return Ok(None);
        }
        let page = mlx5.registers_at(page)?;
        // Here nobody knows who else uses the registers, so that descriptors are not written there.
        let send = SendMode { blue_flame: 0, ..common.send };
        let registers = tx::Registers::new(&page, register, blue_flame, Arc::new(()));
        let place = SendPlace { ring, records, completions, completion_records, number: at.number, registers };
        Ok(SendRing::new(ending, Arc::clone(keys), place, send, common.depth))
    }

    fn borrow_receive(
        _: &Mlx5,
        common: &Common,
        at: &ReceiveAt,
        views: &Views,
        around: &Borrow<'_>,
        spread: Arc<Spread>,
    ) -> std::result::Result<Option<ReceiveRing>, PoolDry> {
        let (Some(ring), Some(records), Some(completions), Some(completion_records)) = (
            views.of(at.ring, None),
            views.of(at.records, Some(RECORDS)),
            views.of(at.completions, None),
            views.of(at.completion_records, Some(RECORDS)),
        ) else {
            return Ok(None);
        };
        if !common.is_sound() {
            return Ok(None);
        }
        let (entries, stride) = (at.entries, at.stride);
        let place = ReceivePlace { ring, records, entries, stride, completions, completion_records };
        ReceiveRing::new(spread, around.keys, common.sink, place, around.pool, around.blank, common.receive)
    }

    fn mtu(common: &Common) -> Option<u16> {
        common.is_sound().then_some(common.mtu)
    }
}

impl Common {
    /// Whether every number is one that this driver makes.
    fn is_sound(&self) -> bool {
        let Self { mtu, depth, send, receive, sink } = self;
        let layout = match receive.layout {
            Layout::Linear { buffers } => (1..=8).contains(&buffers),
            Layout::Striding { log } => log <= 8,
        };
        let inline = send.inline <= MAX_INLINE && (send.inline_minimum == 0 || send.inline_minimum == 18);
        (68..=MAX_MTU).contains(mtu)
            && (1..=MAX_DEPTH).contains(depth)
            && layout
            && inline
            && send.max_tso <= MAX_PACKET
            && send.blue_flame <= MAX_BLUE_FLAME
            && receive.longest as usize == longest_frame(*mtu)
            && sink.bytes <= 1 << 20
    }
}
