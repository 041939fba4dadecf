//! The names that almost every packet program uses: `use wirepath::prelude::*`.

pub use std::process::ExitCode;

pub use serde_json::{Value, json};
pub use wirepath_packet::drops::DropReason;
pub use wirepath_packet::{Batch, Packet, PortId};
pub use wirepath_pipeline::epoch::{Domain, Shared};
pub use wirepath_pipeline::registry::{Argument, ArgumentKind, Column, Command, CommandSpec, Page, TableSpec, Unit};
pub use wirepath_pipeline::{Context, Control, ControlPlane, CounterId, Runtime, Stage, WorkerInfo};
pub use wirepath_settings::{ConfigError, Settings};
pub use wirepath_wire::{FiveTuple, HeadersMut, L3Type, L4Type, MacAddr, Parsed};

pub use crate::{App, AppArguments, AppSettings, Built, Config, Failure};
