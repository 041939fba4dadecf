//! The names that almost every packet program uses: `use wirepath::prelude::*`.

pub use std::process::ExitCode;

pub use wirepath_packet::drops::DropReason;
pub use wirepath_packet::{Batch, Packet, PortId};
pub use wirepath_pipeline::{Context, Control, ControlPlane, Runtime, Stage, WorkerInfo};
pub use wirepath_settings::{ConfigError, Settings};
pub use wirepath_wire::{HeadersMut, L3Type, L4Type, MacAddr, Parsed};

pub use crate::{App, AppArguments, AppSettings, Config, Failure};
