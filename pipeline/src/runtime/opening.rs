//! Opening the ports of a program: for a start, and for a check of the machine that a start would meet.

use std::sync::{Arc, Mutex, PoisonError};

use wirepath_flow::Rule;
use wirepath_packet::{Pool, PoolError};
use wirepath_pmd::drivers::{self, DeviceKind, KeySpans, PortSettings, device_kind};
use wirepath_pmd::port::{ConfiguredPort, OpenPort, PortConfig, PortId};

use super::config::RuntimeConfig;
use super::ports::NewPort;
use super::{MAX_PORTS, PortInfo, Runtime, RuntimeError, log_started, not_started, position};
use crate::epoch::Domain;
use crate::observe::Observers;

/// Buffers of the pools of a check, which no packet uses.
const CHECK_BUFFERS: u32 = 64;

/// Pools by NUMA node.
type NodePools = Vec<(Option<u32>, Pool)>;

/// Ports that are being opened one after the other.
struct Opening {
    config: RuntimeConfig,
    /// True for a check: nothing on the machine changes, and the ports cannot be started.
    is_check: bool,
    /// Buffers of each port, if all ports have the same NUMA node.
    share: u32,
    pools: NodePools,
    ports: Vec<ConfiguredPort>,
    info: Vec<PortInfo>,
    spans: Vec<KeySpans>,
}

/// A port that a check has opened.
#[derive(Clone, Debug)]
pub struct OpenedPort {
    /// Its properties.
    pub info: PortInfo,
    /// Reason for its MTU, as a part of a sentence.
    pub mtu_reason: String,
}

/// Result of [`Runtime::check`].
#[derive(Debug)]
pub struct CheckedPorts {
    /// The ports in configuration order, without those that were refused.
    pub ports: Vec<OpenedPort>,
    /// The opened ports for further checks. They cannot be started. Or all errors, in the order in which a start meets
    /// them.
    pub runtime: Result<Runtime, Vec<RuntimeError>>,
}

impl Runtime {
    /// Maps packet memory (one region and one pool on each NUMA node that has a port) and opens the ports.
    pub fn open(ports: Vec<PortSettings>, config: RuntimeConfig) -> Result<Self, RuntimeError> {
        check_counts(&ports, &config)?;
        config.check_cores()?;
        let mut opening = Opening::new(config, ports.len(), false);
        for (id, settings) in (0..).zip(ports) {
            opening.add(PortId::new(id), settings)?;
        }
        opening.check_queues()?;
        Ok(opening.finish())
    }

    /// Finds what [`Self::open`] would refuse on this machine. Changes nothing there, and takes no frame from another
    /// user of an interface.
    pub fn check(ports: Vec<PortSettings>, config: RuntimeConfig) -> CheckedPorts {
        let mut errors: Vec<RuntimeError> = Vec::new();
        let mut opened = Vec::new();
        if let Err(error) = check_counts(&ports, &config) {
            return CheckedPorts { ports: opened, runtime: Err(vec![error]) };
        }
        errors.extend(config.check_cores().err());
        let queues = ports.iter().map(|port| usize::from(port.queues)).sum();
        let mut opening = Opening::new(config, ports.len(), true);
        for (id, settings) in (0..).zip(ports) {
            match opening.add(PortId::new(id), settings) {
                Ok(port) => opened.push(port),
                Err(error) => errors.push(error),
            }
        }
        errors.extend(opening.config.check_queues(queues).err());
        let runtime = if errors.is_empty() { Ok(opening.finish()) } else { Err(errors) };
        CheckedPorts { ports: opened, runtime }
    }
}

/// Rejects too few and too many ports and workers.
fn check_counts(ports: &[PortSettings], config: &RuntimeConfig) -> Result<(), RuntimeError> {
    match ports.len() {
        0 => Err(RuntimeError::NoPorts),
        n if n > MAX_PORTS => Err(RuntimeError::TooManyPorts(n)),
        _ if config.workers.is_empty() => Err(RuntimeError::NoWorkers),
        _ => Ok(()),
    }
}

impl Opening {
    fn new(config: RuntimeConfig, ports: usize, is_check: bool) -> Self {
        let share = config.buffers / ports.max(1) as u32;
        Self { config, is_check, share, pools: Vec::new(), ports: Vec::new(), info: Vec::new(), spans: Vec::new() }
    }

    /// Opens and configures a port.
    fn add(&mut self, id: PortId, settings: PortSettings) -> Result<OpenedPort, RuntimeError> {
        let Self { config, is_check, share, pools, .. } = self;
        let port = open_port(id, settings, *is_check, *share, |node| pool(config, *is_check, pools, node))?;
        let UnstartedPort { configured, info, spans, mtu_reason } = port;
        self.ports.push(configured);
        self.spans.push(spans);
        self.info.push(info.clone());
        Ok(OpenedPort { info, mtu_reason })
    }

    fn check_queues(&self) -> Result<(), RuntimeError> {
        self.config.check_queues(self.info.iter().map(|port| usize::from(port.queues)).sum())
    }

    fn finish(self) -> Runtime {
        let Self { config, ports, info, spans, pools, .. } = self;
        let names = info.iter().map(|port| port.name.as_str());
        let observers = Arc::new(Observers::new(names, config.workers.len()));
        let opener = PortOpener::new(config.clone(), pools.clone());
        let pools = pools.into_iter().map(|(_, pool)| pool).collect();
        let (domain, management, before_workers) = (Domain::new(), None, None);
        Runtime { config, ports, info, spans, domain, pools, opener, observers, management, before_workers }
    }
}

/// A configured port.
struct UnstartedPort {
    configured: ConfiguredPort,
    info: PortInfo,
    spans: KeySpans,
    mtu_reason: String,
}

/// Opens and configures a port. `pool` returns the pool of a NUMA node.
fn open_port(
    id: PortId,
    settings: PortSettings,
    is_check: bool,
    share: u32,
    pool: impl FnOnce(Option<u32>) -> Result<Pool, PoolError>,
) -> Result<UnstartedPort, RuntimeError> {
    let PortSettings { name, plan, queues, depth, mtu, promiscuous, gro, bifurcation, on_loss, key_spans, .. } =
        settings;
    let at = |error| {
        let (at, source) = position(&key_spans, &name, error);
        RuntimeError::Open { at, source }
    };
    let open = if is_check { OpenPort::open_to_check } else { OpenPort::open };
    let port = open(name.clone(), plan).map_err(at)?;
    let capabilities = port.capabilities();
    let entries = depth.saturating_mul(queues.into());
    let (mtu, mtu_reason) = drivers::choose_mtu(mtu, &capabilities, entries, share);
    if !is_check {
        tracing::info!("port {name}: MTU {mtu}, {mtu_reason}");
    }
    let pool = pool(capabilities.numa_node)?;
    let (rx_queues, tx_queues) = (queues, queues);
    let pool_of_port = pool.clone();
    let config = PortConfig { id, rx_queues, tx_queues, depth, mtu, promiscuous, gro, bifurcation, pool: pool_of_port };
    let configured = port.configure(config).map_err(at)?;
    // The driver `auto` may have taken another one, because of the configuration.
    let capabilities = configured.capabilities();
    let mac = capabilities.mac;
    let info = PortInfo { id, mac, name, mtu, queues, on_loss, capabilities, pool, is_removed: false };
    Ok(UnstartedPort { configured, info, spans: key_spans, mtu_reason })
}

/// Returns the pool of a NUMA node, and maps its memory for the first port there.
fn pool(config: &RuntimeConfig, is_check: bool, pools: &mut NodePools, node: Option<u32>) -> Result<Pool, PoolError> {
    if let Some((_, pool)) = pools.iter().find(|(of, _)| *of == node) {
        return Ok(pool.clone());
    }
    let pool = if is_check {
        config.check_memory(node)?;
        Pool::new("check", CHECK_BUFFERS)?
    } else {
        let label = node.map_or("packets".to_owned(), |node| format!("packets of node {node}"));
        config.arena(node)?.pool(&label, config.buffers)?
    };
    pools.push((node, pool.clone()));
    Ok(pool)
}

/// Opens ports of a running program ([`crate::ControlPlane::port_opener`]). Opening takes long, so it happens in a
/// thread of its own.
#[derive(Clone, Debug)]
pub struct PortOpener {
    config: Arc<RuntimeConfig>,
    pools: Arc<Mutex<NodePools>>,
    /// Number of ports of the program.
    ports: usize,
}

impl PortOpener {
    fn new(config: RuntimeConfig, pools: NodePools) -> Self {
        Self { config: Arc::new(config), pools: Arc::new(Mutex::new(pools)), ports: 0 }
    }

    /// Returns the opener of a program that has this number of ports.
    pub(super) fn with_ports(&self, ports: usize) -> Self {
        Self { ports, ..self.clone() }
    }

    /// Returns all pools.
    pub(super) fn pools(&self) -> Vec<Pool> {
        self.lock().iter().map(|(_, pool)| pool.clone()).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, NodePools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens and starts a port with the number `id` ([`crate::ControlPlane::new_port_ids`]). `rules` are the flow rules
    /// of the program in evaluation order. No worker uses the port yet.
    ///
    /// # Errors
    /// If the device refuses the settings, or the packet memory has no room for the port.
    pub fn open(&self, id: PortId, settings: PortSettings, rules: &[Rule]) -> Result<NewPort, RuntimeError> {
        settings.check_privileges().map_err(|error| {
            let (at, source) = position(&settings.key_spans, &settings.name, error);
            RuntimeError::Open { at, source }
        })?;
        let share = self.config.buffers / (self.ports as u32 + 1);
        let entries = settings.depth.saturating_mul(settings.queues.into());
        let node_pool = |node| pool(&self.config, false, &mut self.lock(), node);
        let UnstartedPort { mut configured, info, spans, .. } = open_port(id, settings, false, share, node_pool)?;
        // The rings of the other ports must not run empty.
        let free = info.pool.available();
        if device_kind(info.capabilities.driver) != DeviceKind::Virtual && free < entries {
            return Err(RuntimeError::NoBuffers { port: info.name, needed: entries, free });
        }
        let refused = |error| not_started(&spans, &info.name, error);
        configured.set_rules(rules).map_err(refused)?;
        configured.segment_superframes();
        let started = configured.start().map_err(refused)?;
        log_started(&started.port);
        Ok(NewPort::new(info, started))
    }
}
