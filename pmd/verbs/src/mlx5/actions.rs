// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! Actions of steering rules: packet reformat, header modification and counters.
//!
//! The kernel supports two kinds of reformat at ingress and two at egress. Each is a constructor of its table's type,
//! so that others do not compile:
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
    ALLOC_FLOW_COUNTER, AllocFlowCounterIn, AllocFlowCounterOut, Command, CommandOutput, MODIFY_ADD, MODIFY_COPY,
    MODIFY_SET, Modify, QUERY_FLOW_COUNTER, QueryFlowCounterIn, QueryFlowCounterOut,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Mlx5;
use super::steering::{Egress, Ingress, Table};
use crate::flow::FlowAction;
use crate::{Context, Error, Result};

/// Packet reformat: inserts or removes outer headers (mlx5dv_flow(7), `mlx5dv_create_flow_action_packet_reformat`).
#[derive(Clone, Debug)]
pub struct Reformat<T: Table> {
    pub(super) action: FlowAction,
    table: PhantomData<T>,
}

/// Link-layer header that replaces all headers before the network header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkHeader {
    /// Addresses and EtherType (14 bytes).
    Untagged([u8; 14]),
    /// Addresses, VLAN tag and EtherType (18 bytes).
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
    /// Returns true if another object refers to it.
    pub fn is_used(&self) -> bool {
        self.action.is_used()
    }

    fn create(mlx5: &Mlx5, kind: u32, data: &[u8]) -> Result<Self> {
        let create = mlx5.library()?.mlx5dv_create_flow_action_packet_reformat()?;
        let mut data = data.to_vec();
        let pointer = if data.is_empty() { std::ptr::null_mut() } else { data.as_mut_ptr().cast() };
        let context = mlx5.inner().raw.as_ptr();
        // SAFETY: the context is open and belongs to libmlx5. `pointer` is valid for `data.len()` bytes, which the
        // call copies. The returned action is new, and nothing else owns it.
        let action = unsafe {
            let raw = create(context, data.len(), pointer, kind, T::TYPE);
            FlowAction::from_raw(&mlx5.context, "mlx5dv_create_flow_action_packet_reformat", raw)
        };
        Ok(Self { action: action?, table: PhantomData })
    }
}

impl Reformat<Ingress> {
    /// Creates a reformat that removes all headers before the Ethernet frame inside a tunnel.
    ///
    /// # Errors
    /// The device does not support it.
    pub fn l2_tunnel_to_l2(mlx5: &Mlx5) -> Result<Self> {
        Self::create(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2, &[])
    }

    /// Creates a reformat that replaces all headers before the network header inside a tunnel with `link`.
    ///
    /// # Errors
    /// The device does not support it.
    pub fn l3_tunnel_to_l2(mlx5: &Mlx5, link: &LinkHeader) -> Result<Self> {
        Self::create(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2, link.bytes())
    }
}

impl Reformat<Egress> {
    /// Creates a reformat that inserts `headers` (Ethernet to tunnel) before the frame. The device writes their
    /// length fields.
    ///
    /// # Errors
    /// There are no headers, they are too long for the device, or the device does not support the reformat.
    pub fn l2_to_l2_tunnel(mlx5: &Mlx5, headers: &[u8]) -> Result<Self> {
        Self::encapsulation(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL, headers)
    }

    /// Creates a reformat that replaces the frame's link-layer header with `headers` (Ethernet to tunnel).
    ///
    /// # Errors
    /// There are no headers, they are too long for the device, or the device does not support the reformat.
    pub fn l2_to_l3_tunnel(mlx5: &Mlx5, headers: &[u8]) -> Result<Self> {
        Self::encapsulation(mlx5, MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL, headers)
    }

    fn encapsulation(mlx5: &Mlx5, kind: u32, headers: &[u8]) -> Result<Self> {
        if headers.is_empty() {
            return Err(Error::InvalidRequest("an encapsulation needs headers".to_owned()));
        }
        Self::create(mlx5, kind, headers)
    }
}

impl<T: Table> From<&Reformat<T>> for FlowAction {
    fn from(reformat: &Reformat<T>) -> Self {
        reformat.action.clone()
    }
}

/// Command of a header modification. Fields are `MODIFY_*` of [`wirepath_nic_defs::mlx5`]. Bits are counted from the
/// least significant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Modification(u32, u32);

impl Modification {
    /// Returns a command that writes `bits` bits (1 to 32) of a field, starting at bit `offset`.
    pub const fn set(field: u32, offset: u32, bits: u32, value: u32) -> Self {
        Self(Self::first(MODIFY_SET, field, offset, bits), value)
    }

    /// Returns a command that adds `value` to a field, modulo its size. For a field of 8 bits, 0xff subtracts one.
    pub const fn add(field: u32, value: u32) -> Self {
        Self(Self::first(MODIFY_ADD, field, 0, 0), value)
    }

    /// Returns a command that copies `bits` bits of a field to another field.
    pub const fn copy(from: u32, from_offset: u32, to: u32, to_offset: u32, bits: u32) -> Self {
        let second = Modify(0).with_field(to).with_offset(to_offset);
        Self(Self::first(MODIFY_COPY, from, from_offset, bits), second.0)
    }

    /// Returns the first word of a command. A length of 32 bits is encoded as 0.
    const fn first(action: u32, field: u32, offset: u32, bits: u32) -> u32 {
        Modify(0).with_action(action).with_field(field).with_offset(offset).with_length(bits).0
    }

    fn encode(self) -> u64 {
        let [a, b, c, d] = self.0.to_be_bytes();
        let [e, f, g, h] = self.1.to_be_bytes();
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    }
}

/// Header modification (mlx5dv_flow(7), `mlx5dv_create_flow_action_modify_header`). The device updates the checksums.
#[derive(Clone, Debug)]
pub struct ModifyHeader<T: Table> {
    pub(super) action: FlowAction,
    table: PhantomData<T>,
}

impl<T: Table> ModifyHeader<T> {
    /// Returns true if another object refers to it.
    pub fn is_used(&self) -> bool {
        self.action.is_used()
    }

    /// Creates a modification from commands, in this order.
    ///
    /// # Errors
    /// There are no commands, there are too many for the device, or the device does not support one of them.
    pub fn new(mlx5: &Mlx5, commands: &[Modification]) -> Result<Self> {
        if commands.is_empty() {
            return Err(Error::InvalidRequest("a header modification needs commands".to_owned()));
        }
        let create = mlx5.library()?.mlx5dv_create_flow_action_modify_header()?;
        let mut words: Vec<u64> = commands.iter().map(|command| command.encode()).collect();
        // SAFETY: the context is open and belongs to libmlx5. `words` is valid for the given number of bytes, which
        // the call copies. The returned action is new, and nothing else owns it.
        let action = unsafe {
            let raw = create(mlx5.inner().raw.as_ptr(), size_of_val(&*words), words.as_mut_ptr(), T::TYPE);
            FlowAction::from_raw(&mlx5.context, "mlx5dv_create_flow_action_modify_header", raw)
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

// SAFETY: `raw` is an owned pointer, and libmlx5 locks the state that it changes.
unsafe impl Send for CounterInner {}
// SAFETY: libmlx5 locks the state that it changes.
unsafe impl Sync for CounterInner {}

impl Drop for CounterInner {
    fn drop(&mut self) {
        let destroy = self.mlx5.library().and_then(|library| Ok(library.mlx5dv_devx_obj_destroy()?));
        // SAFETY: the counter is alive and is destroyed once. Rules keep it alive, so none is left.
        if let Ok(result) = destroy.map(|destroy| unsafe { destroy(self.raw.as_ptr()) }) {
            self.mlx5.inner().check_destroyed("mlx5dv_devx_obj_destroy", Ok(result), || None);
        }
    }
}

/// Counter of packets and bytes that any number of rules may share. It needs a context with DevX ([`Mlx5::open`]).
/// Clones refer to the same counter.
///
/// Rules of matchers support no other counters. The header defines `MLX5DV_FLOW_ACTION_IBV_COUNTER`, but libmlx5
/// fails with `EOPNOTSUPP` (rdma-core 44 to 65, `providers/mlx5/verbs.c`, `_mlx5dv_create_flow`). Counters of verbs
/// ([`crate::flow::Counters`]) are for rules of `ibv_create_flow`.
#[derive(Clone, Debug)]
pub struct FlowCounter(Arc<CounterInner>);

impl FlowCounter {
    /// Allocates a counter with value 0.
    ///
    /// # Errors
    /// The context has no DevX (`EOPNOTSUPP`), or the device has no more counters.
    pub fn new(mlx5: &Mlx5) -> Result<Self> {
        if !mlx5.has_devx() {
            return Err(mlx5.inner().error("mlx5dv_devx_obj_create", libc::EOPNOTSUPP, None));
        }
        let library = mlx5.library()?;
        let create = library.mlx5dv_devx_obj_create()?;
        library.mlx5dv_devx_obj_destroy()?;
        let input = AllocFlowCounterIn { command: Command::new(ALLOC_FLOW_COUNTER), ..AllocFlowCounterIn::default() };
        let mut output = AllocFlowCounterOut::default();
        // SAFETY: the context is open and belongs to libmlx5. `input` and `output` are valid for the given lengths.
        let raw = unsafe {
            create(
                mlx5.inner().raw.as_ptr(),
                input.as_bytes().as_ptr().cast(),
                size_of_val(&input),
                output.as_mut_bytes().as_mut_ptr().cast(),
                size_of_val(&output),
            )
        };
        let raw = mlx5.inner().check_created("mlx5dv_devx_obj_create", raw, None)?;
        let counter = Self(Arc::new(CounterInner { raw, id: output.id.get(), mlx5: mlx5.clone() }));
        check_output(mlx5, "mlx5dv_devx_obj_create", output.output)?;
        Ok(counter)
    }

    /// Reads the number of packets and of bytes since the counter was allocated.
    ///
    /// # Errors
    /// The device cannot read the counter.
    pub fn read(&self) -> Result<(u64, u64)> {
        let CounterInner { raw, id, mlx5 } = &*self.0;
        let query = mlx5.library()?.mlx5dv_devx_obj_query()?;
        let input = QueryFlowCounterIn {
            command: Command::new(QUERY_FLOW_COUNTER),
            id: (*id).into(),
            ..QueryFlowCounterIn::default()
        };
        let mut output = [0u8; size_of::<QueryFlowCounterOut>()];
        // SAFETY: the counter object is alive. `input` and `output` are valid for the given lengths.
        let result = unsafe {
            query(
                raw.as_ptr(),
                input.as_bytes().as_ptr().cast(),
                size_of_val(&input),
                output.as_mut_ptr().cast(),
                output.len(),
            )
        };
        mlx5.inner().check("mlx5dv_devx_obj_query", result)?;
        let output = QueryFlowCounterOut::read_from_bytes(&output)
            .map_err(|_| mlx5.inner().invalid_answer("mlx5dv_devx_obj_query", "an output of the wrong length"))?;
        check_output(mlx5, "mlx5dv_devx_obj_query", output.output)?;
        Ok((output.packets.get(), output.bytes.get()))
    }

    pub(super) fn raw(&self) -> NonNull<mlx5dv_devx_obj> {
        self.0.raw
    }

    pub(super) fn context(&self) -> &Context {
        &self.0.mlx5.context
    }
}

/// Checks that the device executed a command that the kernel passed on.
pub(super) fn check_output(mlx5: &Mlx5, call: &'static str, output: CommandOutput) -> Result<()> {
    if output.status == 0 {
        return Ok(());
    }
    let problem = format!("command status {:#x}, syndrome {:#x}", output.status, output.syndrome.get());
    Err(mlx5.inner().invalid_answer(call, problem))
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
