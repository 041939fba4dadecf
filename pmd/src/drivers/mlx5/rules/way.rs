//! By which of the two ways rules get in.

use wirepath_verbs::mlx5::Mlx5;

use super::{Dv, capabilities};
use crate::drivers::direct::rules::ibv::{self, Ibv};
use crate::drivers::direct::rules::{Backend, Place};
use crate::flow::FieldSet;
use crate::port::hardware::{HardwareCount, HardwareRule, RuleBackend, RuleCapabilities, RuleRefusal};

/// What the configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Wish {
    /// mlx5dv, or where the device has none of that, `ibv_create_flow`.
    Auto,
    /// mlx5dv.
    Dv,
    /// `ibv_create_flow`.
    Ibv,
    /// Neither.
    Off,
}

/// One of the two.
pub(in super::super) enum Way {
    Dv(Box<Dv>),
    Ibv(Ibv),
}

/// A rule in the device.
pub(in super::super) enum Live {
    Dv(super::Live),
    Ibv(ibv::Live),
}

impl Wish {
    /// What a port called `device` can do in the way that is wished, if it can at all; `flows`: it has `ibv_create_flow`.
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

impl Way {
    /// The way that the capabilities tell of.
    pub(in super::super) fn new(backend: RuleBackend, mlx5: &Mlx5, port: u8) -> Self {
        match backend {
            RuleBackend::Dv => Self::Dv(Box::new(Dv::new(mlx5, port))),
            RuleBackend::Ibv => Self::Ibv(Ibv::new(mlx5.context(), port)),
        }
    }
}

impl Backend for Way {
    type Live = Live;

    fn tells(&self, rule: &HardwareRule, fields: &FieldSet) -> Result<(), String> {
        match self {
            Self::Dv(dv) => dv.tells(rule, fields),
            Self::Ibv(ibv) => ibv.tells(rule, fields),
        }
    }

    fn install(&mut self, rule: &HardwareRule, places: &[Place]) -> Result<Live, RuleRefusal> {
        match self {
            Self::Dv(dv) => dv.install(rule, places).map(Live::Dv),
            Self::Ibv(ibv) => ibv.install(rule, places).map(Live::Ibv),
        }
    }

    fn count(&mut self, live: &Live) -> Option<HardwareCount> {
        match (self, live) {
            (Self::Dv(dv), Live::Dv(live)) => dv.count(live),
            (Self::Ibv(ibv), Live::Ibv(live)) => ibv.count(live),
            _ => None,
        }
    }

    fn tidy(&mut self) {
        if let Self::Dv(dv) = self {
            dv.tidy();
        }
    }
}
