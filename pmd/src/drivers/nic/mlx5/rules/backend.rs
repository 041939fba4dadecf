//! Choice between the two interfaces for flow rules.

use wirepath_verbs::mlx5::Mlx5;

use super::{DvBackend, capabilities};
use crate::drivers::nic::common::rules::ibv::{self, IbvBackend};
use crate::drivers::nic::common::rules::{Backend, SteeringEntry};
use crate::port::hardware::{HardwareCount, HardwareRule, RuleBackend, RuleCapabilities, RuleRefusal};
use wirepath_flow::FieldSet;

/// The `rules` setting of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum RuleBackendChoice {
    /// mlx5dv; `ibv_create_flow` if the device does not support mlx5dv rules.
    Auto,
    /// mlx5dv.
    Dv,
    /// `ibv_create_flow`.
    Ibv,
    /// No rules in the device.
    Off,
}

/// One of the two backends.
pub(in super::super) enum AnyBackend {
    Dv(Box<DvBackend>),
    Ibv(IbvBackend),
}

/// An installed rule.
pub(in super::super) enum InstalledRule {
    Dv(super::InstalledRule),
    Ibv(ibv::InstalledRule),
}

impl RuleBackendChoice {
    /// Returns the rule capabilities of a port called `device`, if any. `flows`: the device supports
    /// `ibv_create_flow`.
    pub(in super::super) fn capabilities(
        self,
        mlx5: &Mlx5,
        flows: bool,
        driver: &str,
        device: &str,
    ) -> Option<RuleCapabilities> {
        let dv = || capabilities(mlx5, flows, driver, device);
        let ibv = || flows.then(|| ibv::capabilities(driver, device));
        match self {
            Self::Auto => dv().or_else(ibv),
            Self::Dv => dv(),
            Self::Ibv => ibv(),
            Self::Off => None,
        }
    }
}

impl AnyBackend {
    /// Creates the backend that the capabilities name.
    pub(in super::super) fn new(backend: RuleBackend, mlx5: &Mlx5, port: u8) -> Self {
        match backend {
            RuleBackend::Dv => Self::Dv(Box::new(DvBackend::new(mlx5, port))),
            RuleBackend::Ibv => Self::Ibv(IbvBackend::new(mlx5.context(), port)),
        }
    }
}

impl Backend for AnyBackend {
    type InstalledRule = InstalledRule;

    fn can_match(&self, rule: &HardwareRule, fields: &FieldSet) -> Result<(), String> {
        match self {
            Self::Dv(dv) => dv.can_match(rule, fields),
            Self::Ibv(ibv) => ibv.can_match(rule, fields),
        }
    }

    fn install(&mut self, rule: &HardwareRule, entries: &[SteeringEntry]) -> Result<InstalledRule, RuleRefusal> {
        match self {
            Self::Dv(dv) => dv.install(rule, entries).map(InstalledRule::Dv),
            Self::Ibv(ibv) => ibv.install(rule, entries).map(InstalledRule::Ibv),
        }
    }

    fn count(&mut self, installed: &InstalledRule) -> Option<HardwareCount> {
        match (self, installed) {
            (Self::Dv(dv), InstalledRule::Dv(installed)) => dv.count(installed),
            (Self::Ibv(ibv), InstalledRule::Ibv(installed)) => ibv.count(installed),
            _ => None,
        }
    }

    fn gc(&mut self) {
        if let Self::Dv(dv) = self {
            dv.gc();
        }
    }
}
