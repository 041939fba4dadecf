//! Queues of a MANA in another process: the page of doorbells is mapped there from the device file, everything else is memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use wirepath_memory::{DeviceMemory, Doorbell};
use wirepath_nic_defs::mana::{DOORBELL_RQ, DOORBELL_SQ};
use wirepath_verbs::mlx5::var::{ImportedVar, Var};
use wirepath_verbs::{Context, Error, Result};

use super::cq::Positions;
use super::nic::{self, MAX_MTU, ManaNic, ManaVerbs, Opened, Placed, send_place};
use super::rx::{ReceivePlace, ReceiveRing};
use super::tx::{SendPlace, SendRing};
use crate::drivers::direct::attach::{At, Borrow, Lend, Lent, Views};
use crate::drivers::direct::device::Parts;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::opened::odd_ring;
use crate::drivers::direct::receive::{PoolDry, Spread};
use crate::port::PortConfig;

/// What all queues have in common.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Common {
    mtu: u16,
}

/// Where a send queue lies.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SendAt {
    ring: At,
    completions: At,
    sq: u32,
    cq: u32,
    vport: u32,
}

/// Where a receive queue lies.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ReceiveAt {
    ring: At,
    completions: At,
    rq: u32,
}

/// A receive queue for another process.
pub(super) fn receive(opened: &Opened, placed: Placed<ReceivePlace>) -> Result<Lent<ReceiveAt>> {
    let Placed { place, fate, .. } = placed;
    let at = |memory: &DeviceMemory| opened.at(memory).ok_or_else(|| odd_ring("a queue of another process"));
    let at = ReceiveAt { ring: at(&place.ring)?, completions: at(&place.completions)?, rq: place.rq };
    Ok(Lent { keep: Box::new(place), fate, at })
}

/// There is nothing of the kind.
fn no_var() -> Error {
    Error::Request("a MANA has no VAR".to_owned())
}

impl Lend for ManaNic {
    type Common = Common;
    type SendAt = SendAt;
    type Visitor = DeviceMemory;

    fn common(&self, _: &Arc<Keys>, config: &PortConfig) -> Common {
        Common { mtu: config.mtu }
    }

    fn lend_send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Lent<SendAt>> {
        let owner = usize::from(parts.config.tx_queues) + index;
        let Placed { place, fate, .. } = send_place(parts.opened, owner, self.send_depth(parts.config))?;
        let at = |memory: &DeviceMemory| parts.opened.at(memory).ok_or_else(|| odd_ring("a queue of another process"));
        let (ring, completions) = (at(&place.ring)?, at(&place.completions)?);
        let at = SendAt { ring, completions, sq: place.sq, cq: place.cq, vport: place.vport };
        Ok(Lent { keep: Box::new(place), fate, at })
    }

    fn lkey(memory: &Arc<Keys>) -> u32 {
        memory.home().lkey()
    }

    fn registration(_: &Arc<Keys>) -> Option<u32> {
        // libmana imports nothing.
        None
    }

    fn var(_: &ManaVerbs) -> Result<Var> {
        Err(no_var())
    }

    fn import_var(_: &DeviceMemory, _: &[u8], _: &OwnedFd) -> Result<ImportedVar> {
        Err(no_var())
    }

    fn visit(device: OwnedFd) -> Result<(DeviceMemory, Option<Context>)> {
        Ok((wirepath_verbs::mana::map_doorbells(device.as_fd())?, None))
    }

    fn borrow_send(
        page: &DeviceMemory,
        _: &Common,
        at: &SendAt,
        views: &Views,
        keys: &Arc<Keys>,
        ending: Ending,
    ) -> Result<Option<SendRing>> {
        let (Some(ring), Some(completions)) = (views.of(at.ring, None), views.of(at.completions, None)) else {
            return Ok(None);
        };
        let doorbell = Doorbell::new(page, DOORBELL_SQ);
        let place = SendPlace { ring, completions, sq: at.sq, cq: at.cq, vport: at.vport, doorbell };
        Ok(SendRing::new(ending, Arc::clone(keys), place, Positions::UNKNOWN))
    }

    fn borrow_receive(
        page: &DeviceMemory,
        common: &Common,
        at: &ReceiveAt,
        views: &Views,
        around: &Borrow<'_>,
        spread: Arc<Spread>,
    ) -> std::result::Result<Option<ReceiveRing>, PoolDry> {
        let (Some(ring), Some(completions)) = (views.of(at.ring, None), views.of(at.completions, None)) else {
            return Ok(None);
        };
        let doorbell = Doorbell::new(page, DOORBELL_RQ);
        let place = ReceivePlace { ring, completions, rq: at.rq, doorbell };
        let buffers = nic::buffers(common.mtu);
        ReceiveRing::new(spread, around.keys, place, around.pool, around.blank, buffers, Positions::UNKNOWN)
    }

    fn mtu(common: &Common) -> Option<u16> {
        (68..=MAX_MTU).contains(&common.mtu).then_some(common.mtu)
    }
}
