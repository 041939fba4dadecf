// UNSAFETY: calls libmlx5.
#![allow(unsafe_code)]

//! Capabilities that only the firmware reports (mlx5dv_devx_general_cmd(3)).

use wirepath_nic_defs::mlx5::{
    CAPABILITIES_GENERAL, CAPABILITIES_NIC_FLOW_TABLE, CAPABILITIES_OFFSET, Command, CommandOutput, QUERY_HCA_CAP,
    QUERY_HCA_CAP_IN_BYTES, QUERY_HCA_CAP_OUT_BYTES, TIMESTAMPS_REAL_TIME, capability_modifier, flow_table_capability,
    general_capability,
};
use zerocopy::{FromBytes, IntoBytes};

use super::Mlx5;
use super::actions::check_output;
use crate::Result;

/// Limits of flow rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleLimits {
    /// Maximum number of header modifications of an ingress rule.
    pub ingress_modifications: u16,
    /// Maximum number of header modifications of an egress rule.
    pub egress_modifications: u16,
    /// Maximum number of bytes of an encapsulation header.
    pub encap_header: u16,
}

impl Mlx5 {
    /// Queries the limits of flow rules. Kernels allow the query without DevX too (Linux
    /// `drivers/infiniband/hw/mlx5/devx.c`, `devx_is_whitelist_cmd`).
    ///
    /// # Errors
    /// The kernel does not pass the query to the firmware, or the device has no flow tables.
    pub fn rule_limits(&self) -> Result<RuleLimits> {
        let general = self.query_capabilities(CAPABILITIES_GENERAL)?;
        if general_capability::NIC_FLOW_TABLE.get(&general) == 0 {
            return Err(self.inner().error("mlx5dv_devx_general_cmd", libc::EOPNOTSUPP, None));
        }
        let table = self.query_capabilities(CAPABILITIES_NIC_FLOW_TABLE)?;
        Ok(RuleLimits {
            ingress_modifications: flow_table_capability::RX_MODIFY_ACTIONS.get(&table) as u16,
            egress_modifications: flow_table_capability::TX_MODIFY_ACTIONS.get(&table) as u16,
            encap_header: flow_table_capability::MAX_ENCAP_HEADER.get(&table) as u16,
        })
    }

    /// Returns true if receive queues can stamp packets only with the time of day, not with the clock of
    /// [`crate::Context::read_clock`]. Linux chooses that clock where it can (`drivers/infiniband/hw/mlx5/qp.c`,
    /// `get_ts_format`).
    ///
    /// # Errors
    /// The kernel does not pass the query to the firmware.
    pub fn has_only_real_time_stamps(&self) -> Result<bool> {
        let general = self.query_capabilities(CAPABILITIES_GENERAL)?;
        Ok(general_capability::RQ_TS_FORMAT.get(&general) == u128::from(TIMESTAMPS_REAL_TIME))
    }

    /// Returns the current capabilities of a group (`QUERY_HCA_CAP`).
    fn query_capabilities(&self, group: u16) -> Result<Vec<u8>> {
        const CALL: &str = "mlx5dv_devx_general_cmd";
        let general = self.library()?.mlx5dv_devx_general_cmd()?;
        let mut input = [0; QUERY_HCA_CAP_IN_BYTES];
        let command = Command { modifier: capability_modifier(group).into(), ..Command::new(QUERY_HCA_CAP) };
        input[..size_of::<Command>()].copy_from_slice(command.as_bytes());
        let mut output = vec![0; QUERY_HCA_CAP_OUT_BYTES];
        let context = self.inner().raw.as_ptr();
        // SAFETY: the context is open and belongs to libmlx5. `input` and `output` are valid for the given lengths.
        let result =
            unsafe { general(context, input.as_ptr().cast(), input.len(), output.as_mut_ptr().cast(), output.len()) };
        self.inner().check(CALL, result)?;
        let (header, _) = CommandOutput::read_from_prefix(&output)
            .map_err(|_| self.inner().invalid_answer(CALL, "an output of the wrong length"))?;
        check_output(self, CALL, header)?;
        Ok(output.split_off(CAPABILITIES_OFFSET))
    }
}
