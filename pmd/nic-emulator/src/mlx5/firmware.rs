//! General firmware commands of programs (DevX): the checks of `mlx5_ib`, and what the firmware answers. Source: Linux
//! `drivers/infiniband/hw/mlx5/devx.c`.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{self as defs, Command, CommandField};
use wirepath_nic_defs::uverbs::mlx5 as abi;
use zerocopy::FromBytes;

use super::Mlx5;
use crate::attributes::Attributes;
use crate::call::Call;
use crate::host::Host;

impl<H: Host> Mlx5<H> {
    /// Handles a general command.
    pub(super) fn general_command(
        &self,
        call: &mut Call<'_, H>,
        attributes: &mut Attributes<'_, H>,
    ) -> Result<(), Errno> {
        let input = attributes.bytes(abi::DEVX_OTHER_IN)?;
        let Ok((command, _)) = Command::read_from_prefix(&input) else { return Err(Errno::INVAL) };
        // The kernel needs a user object of the firmware, in the name of which it sends commands.
        if !self.spec.mlx5.steering.firmware {
            // Libraries and drivers work without.
            return Err(call.decline(Errno::OPNOTSUPP));
        }
        let answer = match command.opcode.get() {
            defs::QUERY_HCA_CAP => self.capabilities(command.modifier.get()),
            _ => None,
        };
        let Some(answer) = answer else {
            let (opcode, modifier) = (command.opcode, command.modifier);
            let why = format_args!("{}: firmware command {opcode:#x}, modifier {modifier:#x}", self.name());
            return Err(call.refuse(Errno::INVAL, why));
        };
        attributes.put(abi::DEVX_OTHER_OUT, &answer)
    }

    /// Returns the output of `QUERY_HCA_CAP`. `None` for an unknown group.
    fn capabilities(&self, modifier: u16) -> Option<Vec<u8>> {
        let mlx5 = &self.spec.mlx5;
        let mut output = vec![0; defs::QUERY_HCA_CAP_OUT_BYTES];
        let group = &mut output[defs::CAPABILITIES_OFFSET..];
        let mut set = |field: CommandField, value: u32| field.set(group, u128::from(value));
        // Maximum and current values are the same.
        match modifier >> 1 {
            defs::CAPABILITIES_GENERAL => {
                set(defs::general_capability::NIC_FLOW_TABLE, 1);
                set(defs::general_capability::ETH_NET_OFFLOADS, 1);
            }
            defs::CAPABILITIES_NIC_FLOW_TABLE => {
                set(defs::flow_table_capability::MAX_ENCAP_HEADER, mlx5.steering.encap_bytes.min(0x3ff));
                set(defs::flow_table_capability::RX_MODIFY_ACTIONS, mlx5.steering.modify_actions);
                set(defs::flow_table_capability::TX_MODIFY_ACTIONS, mlx5.steering.modify_actions);
            }
            _ => return None,
        }
        Some(output)
    }
}
