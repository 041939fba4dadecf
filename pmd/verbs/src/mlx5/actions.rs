// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! What rules do to packets: packet reformat, header modification, counters.
//!
//! The kernel takes two kinds of reformat at reception and two at transmission, and nothing else; here each is a constructor of its
//! table's type:
//!
//! ```compile_fail
//! # use wirepath_verbs::mlx5::{Egress, Mlx5, Reformat};
//! # fn of(mlx5: &Mlx5) {
//! let decapsulation_at_transmission = Reformat::<Egress>::l2_tunnel_to_l2(mlx5);
//! # }
//! ```

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::mlx5dv::*;
use wirepath_nic_defs::mlx5::{
    ALLOC_FLOW_COUNTER, AllocFlowCounter, AllocFlowCounterAnswer, Answer, Command, MODIFY_ADD, MODIFY_COPY, MODIFY_SET,
    Modify, QUERY_FLOW_COUNTER, QueryFlowCounter, QueryFlowCounterAnswer,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Mlx5;
use super::steering::{Egress, Ingress, Table};
use crate::flow::FlowAction;
use crate::{Context, Error, Result};

/// Puts a header in front of packets, or takes one off (mlx5dv_flow(7), `mlx5dv_create_flow_action_packet_reformat`).
#[derive(Clone, Debug)]
pub struct Reformat<T: Table> {
    pub(super) action: FlowAction,
    table: PhantomData<T>,
}

/// The link-layer header that packets get when all before their network header is taken off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkHeader {
    /// Addresses and EtherType.
    Untagged([u8; 14]),
    /// The same with a VLAN tag.
    Tagged([u8; 18]),
}

impl LinkHeader {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Untagged(bytes) => bytes,
            Self::Tagged(bytes) => bytes,
        }
    }
}

impl<T: Table> Reformat<T> {
    /// Whether anything else has it.
    pub fn is_used(&self) -> bool {
        self.action.is_used()
    }

    fn create(mlx5: &Mlx5, kind: u32, data: &[u8]) -> Result<Self> {
        let create = mlx5.library()?.mlx5dv_create_flow_action_packet_reformat()?;
        let mut data = data.to_vec();
        let pointer = if data.is_empty() { std::ptr::null_mut() } else { data.as_mut_ptr().cast() };
        let context = mlx5.inner().raw.as_ptr();
        // SAFETY: an open context of libmlx5, as many bytes as are announced, copied during the call; the action is new.
        let action = unsafe {
            let raw = create(context, data.len(), pointer, kind, T::TYPE);
            FlowAction::adopt(&mlx5.context, "mlx5dv_create_flow_action_packet_reformat", raw)
        };
        Ok(Self { action: action?, table: PhantomData })
    }
}

impl Reformat<Ingress> {
    /// Takes off everything before the Ethernet frame inside a tunnel.
    ///
    /// # Errors
    /// The device cannot.
    pub fn l2_tunnel_to_l2(mlx5: &Mlx5) -> Result<Self> {
        Self::create(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2, &[])
    }

    /// Takes off everything before the network header inside a tunnel, and puts this header there.
    ///
    /// # Errors
    /// The device cannot.
    pub fn l3_tunnel_to_l2(mlx5: &Mlx5, link: &LinkHeader) -> Result<Self> {
        Self::create(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2, link.bytes())
    }
}

impl Reformat<Egress> {
    /// Puts `headers` (Ethernet to tunnel) in front of the frame. The device writes the lengths in them.
    ///
    /// # Errors
    /// There are no headers, they are longer than the device can, or it cannot at all.
    pub fn l2_to_l2_tunnel(mlx5: &Mlx5, headers: &[u8]) -> Result<Self> {
        Self::encapsulation(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL, headers)
    }

    /// Puts `headers` (Ethernet to tunnel) in the place of the frame's own link-layer header.
    ///
    /// # Errors
    /// As for [`Self::l2_to_l2_tunnel`].
    pub fn l2_to_l3_tunnel(mlx5: &Mlx5, headers: &[u8]) -> Result<Self> {
        Self::encapsulation(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL, headers)
    }

    fn encapsulation(mlx5: &Mlx5, kind: u32, headers: &[u8]) -> Result<Self> {
        if headers.is_empty() {
            return Err(Error::Request("an encapsulation without headers".to_owned()));
        }
        Self::create(mlx5, kind, headers)
    }
}

impl<T: Table> From<&Reformat<T>> for FlowAction {
    fn from(reformat: &Reformat<T>) -> Self {
        reformat.action.clone()
    }
}

/// One command of a header modification. Fields are `MODIFY_*` of [`wirepath_nic_defs::mlx5`]; bits are counted from the least
/// significant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Modification(u32, u32);

impl Modification {
    /// Writes `bits` (1 to 32) of a field from bit `offset` on.
    pub const fn set(field: u32, offset: u32, bits: u32, value: u32) -> Self {
        Self(Self::first(MODIFY_SET, field, offset, bits), value)
    }

    /// Adds to a field, modulo its size: 0xff takes one from 8 bits.
    pub const fn add(field: u32, value: u32) -> Self {
        Self(Self::first(MODIFY_ADD, field, 0, 0), value)
    }

    /// Copies `bits` of a field into another.
    pub const fn copy(from: u32, from_offset: u32, to: u32, to_offset: u32, bits: u32) -> Self {
        let second = Modify(0).with_field(to).with_offset(to_offset);
        Self(Self::first(MODIFY_COPY, from, from_offset, bits), second.0)
    }

    /// 32 bits are written as 0.
    const fn first(action: u32, field: u32, offset: u32, bits: u32) -> u32 {
        Modify(0).with_action(action).with_field(field).with_offset(offset).with_length(bits).0
    }

    fn encode(self) -> u64 {
        let [a, b, c, d] = self.0.to_be_bytes();
        let [e, f, g, h] = self.1.to_be_bytes();
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    }
}

/// Writes into headers (mlx5dv_flow(7), `mlx5dv_create_flow_action_modify_header`). The device mends the checksums.
#[derive(Clone, Debug)]
pub struct ModifyHeader<T: Table> {
    pub(super) action: FlowAction,
    table: PhantomData<T>,
}

impl<T: Table> ModifyHeader<T> {
    /// Whether anything else has it.
    pub fn is_used(&self) -> bool {
        self.action.is_used()
    }

    /// These commands, in this order.
    ///
    /// # Errors
    /// There are none, or the device cannot do one of them, or not so many.
    pub fn new(mlx5: &Mlx5, commands: &[Modification]) -> Result<Self> {
        if commands.is_empty() {
            return Err(Error::Request("a header modification without commands".to_owned()));
        }
        let create = mlx5.library()?.mlx5dv_create_flow_action_modify_header()?;
        let mut words: Vec<u64> = commands.iter().map(|command| command.encode()).collect();
        // SAFETY: an open context of libmlx5, as many bytes as are announced, copied during the call; the action is new.
        let action = unsafe {
            let raw = create(mlx5.inner().raw.as_ptr(), size_of_val(&*words), words.as_mut_ptr(), T::TYPE);
            FlowAction::adopt(&mlx5.context, "mlx5dv_create_flow_action_modify_header", raw)
        };
        Ok(Self { action: action?, table: PhantomData })
    }
}

impl<T: Table> From<&ModifyHeader<T>> for FlowAction {
    fn from(modify: &ModifyHeader<T>) -> Self {
        modify.action.clone()
    }
}

#[derive(Debug)]
struct CounterInner {
    raw: NonNull<mlx5dv_devx_obj>,
    id: u32,
    mlx5: Mlx5,
}

// SAFETY: libmlx5 locks what it changes.
unsafe impl Send for CounterInner {}
// SAFETY: as above.
unsafe impl Sync for CounterInner {}

impl Drop for CounterInner {
    fn drop(&mut self) {
        let destroy = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_devx_obj_destroy()?));
        // SAFETY: made by a creation, dropped once; rules kept it alive.
        if let Ok(result) = destroy.map(|destroy| unsafe { destroy(self.raw.as_ptr()) }) {
            self.mlx5.inner().destroyed("mlx5dv_devx_obj_destroy", Ok(result), || None);
        }
    }
}

/// A counter of packets and bytes that any number of rules may share. Its device must be open for commands: [`Mlx5::open`]. Clones are
/// the same one.
///
/// There is no other kind for rules of matchers: `MLX5DV_FLOW_ACTION_IBV_COUNTER` stands in the header, and libmlx5 answers it with
/// `EOPNOTSUPP` (rdma-core 44 to 65, `providers/mlx5/verbs.c`, `_mlx5dv_create_flow`). Counters of verbs ([`crate::flow::Counters`]) are for
/// rules of `ibv_create_flow`.
#[derive(Clone, Debug)]
pub struct FlowCounter(Arc<CounterInner>);

impl FlowCounter {
    /// A counter at 0.
    ///
    /// # Errors
    /// The device takes no commands (`EOPNOTSUPP`), or has no more counters.
    pub fn new(mlx5: &Mlx5) -> Result<Self> {
        if !mlx5.takes_commands() {
            return Err(mlx5.inner().error("mlx5dv_devx_obj_create", libc::EOPNOTSUPP, None));
        }
        let library = mlx5.library()?;
        let create = library.mlx5dv_devx_obj_create()?;
        library.mlx5dv_devx_obj_destroy()?;
        let question = AllocFlowCounter { command: Command::new(ALLOC_FLOW_COUNTER), ..AllocFlowCounter::default() };
        let mut answer = AllocFlowCounterAnswer::default();
        // SAFETY: an open context of libmlx5; a command and room for its answer, as long as they are said to be.
        let raw = unsafe {
            create(
                mlx5.inner().raw.as_ptr(),
                question.as_bytes().as_ptr().cast(),
                size_of_val(&question),
                answer.as_mut_bytes().as_mut_ptr().cast(),
                size_of_val(&answer),
            )
        };
        let raw = mlx5.inner().created("mlx5dv_devx_obj_create", raw, None)?;
        let counter = Self(Arc::new(CounterInner { raw, id: answer.id.get(), mlx5: mlx5.clone() }));
        accepted(mlx5, "mlx5dv_devx_obj_create", answer.answer)?;
        Ok(counter)
    }

    /// Packets, and bytes of them, since it was made.
    ///
    /// # Errors
    /// The device refused.
    pub fn read(&self) -> Result<(u64, u64)> {
        let CounterInner { raw, id, mlx5 } = &*self.0;
        let query = mlx5.library()?.mlx5dv_devx_obj_query()?;
        let question = QueryFlowCounter {
            command: Command::new(QUERY_FLOW_COUNTER),
            id: (*id).into(),
            ..QueryFlowCounter::default()
        };
        let mut answer = [0u8; size_of::<QueryFlowCounterAnswer>()];
        // SAFETY: a living object; a command and room for its answer, as long as they are said to be.
        let result = unsafe {
            query(
                raw.as_ptr(),
                question.as_bytes().as_ptr().cast(),
                size_of_val(&question),
                answer.as_mut_ptr().cast(),
                answer.len(),
            )
        };
        mlx5.inner().done("mlx5dv_devx_obj_query", result)?;
        let answer = QueryFlowCounterAnswer::read_from_bytes(&answer)
            .map_err(|_| mlx5.inner().nonsense("mlx5dv_devx_obj_query", "an answer of another length"))?;
        accepted(mlx5, "mlx5dv_devx_obj_query", answer.answer)?;
        Ok((answer.packets.get(), answer.bytes.get()))
    }

    pub(super) fn raw(&self) -> NonNull<mlx5dv_devx_obj> {
        self.0.raw
    }

    pub(super) fn context(&self) -> &Context {
        &self.0.mlx5.context
    }
}

/// Whether the device carried out a command that the kernel passed on.
fn accepted(mlx5: &Mlx5, call: &'static str, answer: Answer) -> Result<()> {
    if answer.status == 0 {
        return Ok(());
    }
    let problem = format!("command status {:#x}, syndrome {:#x}", answer.status, answer.syndrome.get());
    Err(mlx5.inner().nonsense(call, problem))
}

#[cfg(test)]
mod tests {
    use wirepath_nic_defs::mlx5::{MODIFY_DST_IPV4, MODIFY_DST_MAC_LOW, MODIFY_REG_B, MODIFY_SRC_MAC_HIGH, MODIFY_TTL};

    use super::*;

    #[test]
    fn commands_are_two_big_endian_words() {
        let bytes = |command: Modification| command.encode().to_ne_bytes();
        assert_eq!(bytes(Modification::set(MODIFY_DST_IPV4, 0, 32, 0x0a00_0001)), [0x10, 0x16, 0, 0, 10, 0, 0, 1]);
        assert_eq!(bytes(Modification::set(MODIFY_DST_MAC_LOW, 4, 12, 0xabc)), [0x10, 5, 4, 12, 0, 0, 0x0a, 0xbc]);
        assert_eq!(bytes(Modification::add(MODIFY_TTL, 0xff)), [0x20, 0x0a, 0, 0, 0, 0, 0, 0xff]);
        assert_eq!(
            bytes(Modification::copy(MODIFY_SRC_MAC_HIGH, 8, MODIFY_REG_B, 16, 16)),
            [0x30, 1, 8, 16, 0, 0x50, 16, 0]
        );
    }
}
