use wirepath_memory::{Backing, RegionBuilder};
use wirepath_packet::{Arena, MAX_BUFFERS, PoolError};
use wirepath_pmd::drivers::{self, PortSettings};
use wirepath_settings::{
    Choice, ConfigError, ConfigTable, Flag, Integer, Key, List, Located, Settings, Span, WithDefault,
};

use super::MAX_PORTS;
use super::{RuntimeError, memory_limit};
use crate::worker::Idle;

/// Use of huge pages for packet memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Use huge pages if any are free, otherwise normal pages.
    #[default]
    Prefer,
    /// Use huge pages, or fail to start.
    Require,
    /// Use normal pages and request transparent huge pages.
    Never,
}

const CORES: Key<List<Integer<usize>>> = Key::integer("cores", 0..=1023)
    .list()
    .absent("one worker, which is not pinned")
    .about("Cores of the workers. Each core gets one worker, which is pinned to it.");
const COUNT: Key<Integer<usize>> = Key::integer("count", 1..=1024)
    .absent("one worker for each of `cores`")
    .about("Workers that are not pinned to cores. Either this key or `cores`.");
const IDLE: Key<WithDefault<Choice<Idle>>> = Key::choice(
    "idle",
    &[
        ("busy", Idle::Busy, "polls without pause: lowest latency, and the whole core is in use"),
        ("adaptive", Idle::Adaptive, "polls for a while and then sleeps until a packet arrives"),
        (
            "sleep",
            Idle::Sleep(Idle::SLEEP_BELOW),
            "sleeps after the first empty turn while the load is below `sleep_below`",
        ),
    ],
)
.default_word("adaptive")
.about("Behaviour of a worker that finds no packets.");
const SLEEP_BELOW: Key<WithDefault<Integer<u64>>> = Key::integer("sleep_below", 1..=u32::MAX as i64)
    .unit("packets per second")
    .default(Idle::SLEEP_BELOW)
    .when("idle = \"sleep\"")
    .about("Load below which a worker sleeps after the first empty turn. Above it, the worker polls for a while.");

/// Description of the table `[workers]`.
pub static WORKERS: ConfigTable = ConfigTable {
    name: "workers",
    about: "Threads that poll the ports and run the stages.",
    absent: "one worker, which is not pinned to a core",
    keys: &[&CORES, &COUNT, &IDLE, &SLEEP_BELOW],
    example: "[workers]\ncores = [2, 3]\nidle = \"adaptive\"\n",
    ..ConfigTable::EMPTY
};

const BUFFERS: Key<WithDefault<Integer<u32>>> = Key::integer("buffers", 64..=MAX_BUFFERS as i64)
    .default(8192)
    .about("Packet buffers on each NUMA node that has a port. A buffer takes 2368 bytes.");
const HUGE_PAGES: Key<WithDefault<Choice<HugePages>>> = Key::choice(
    "huge_pages",
    &[
        ("prefer", HugePages::Prefer, "uses huge pages if any are free, otherwise normal pages"),
        ("require", HugePages::Require, "uses huge pages, or fails to start"),
        ("never", HugePages::Never, "uses normal pages and requests transparent huge pages"),
    ],
)
.default_word("prefer")
.about("Pages of the packet memory. `vm.nr_hugepages` of sysctl(8) reserves huge pages.");
const SHARED: Key<WithDefault<Flag>> = Key::flag("shared")
    .default(false)
    .about("Lets other processes map the packet memory, as the key `attach` of a port requires.");

/// Description of the table `[pool]`.
pub static POOL: ConfigTable = ConfigTable {
    name: "pool",
    about: "Packet memory.",
    absent: "every key has its default",
    keys: &[&BUFFERS, &HUGE_PAGES, &SHARED],
    example: "[pool]\nbuffers = 65536\nhuge_pages = \"require\"\n",
    ..ConfigTable::EMPTY
};

/// Settings of the workers and of packet memory: the tables `[workers]` and `[pool]` of a configuration, which
/// [`WORKERS`] and [`POOL`] describe.
#[derive(Clone, Debug)]
pub struct RuntimeConfig {
    /// One entry per worker: the core to which it is pinned, or `None`.
    pub workers: Vec<Option<usize>>,
    /// Positions of the cores in the configuration, if they come from one.
    pub core_spans: Vec<Span>,
    /// Behaviour of workers that find no packets.
    pub idle: Idle,
    /// Allow workers without a receive queue, for programs that distribute packets with
    /// [`crate::Context::enqueue_to_worker`].
    pub workers_without_queues: bool,
    /// Packet buffers on each NUMA node that has a port.
    pub buffers: u32,
    /// Use of huge pages.
    pub huge_pages: HugePages,
    /// If true, packet memory can be mapped by other processes.
    pub shared: bool,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self {
            workers: vec![None],
            core_spans: Vec::new(),
            idle: IDLE.default_value(),
            workers_without_queues: false,
            buffers: BUFFERS.default_value(),
            huge_pages: HUGE_PAGES.default_value(),
            shared: SHARED.default_value(),
        }
    }
}

impl RuntimeConfig {
    /// Reads `[workers]` and `[pool]` from a configuration's top-level table. Missing keys get their
    /// defaults.
    pub fn from_settings(top: &Settings<'_>) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let workers = top.read_table(&WORKERS, |table| config.read_workers(table));
        let pool = top.read_table(&POOL, |table| config.read_pool(table));
        workers.and(pool).map(|()| config)
    }

    fn read_workers(&mut self, table: &Settings<'_>) -> Result<(), ConfigError> {
        let cores = table.read(&CORES)?;
        for (i, core) in cores.iter().enumerate() {
            if cores[..i].iter().any(|other| other.value == core.value) {
                let message = format!("core {} is named twice; each worker needs a core of its own", core.value);
                table.record(core.error(message));
            }
        }
        if !cores.is_empty() {
            self.workers = cores.iter().map(|Located { value, .. }| Some(*value)).collect();
            self.core_spans = cores.iter().map(|core| core.span().clone()).collect();
        }
        if let Some(count) = table.read(&COUNT)? {
            if table.has(&CORES) {
                let message = "`cores` has one worker for each core already; keep one of both keys";
                table.record(table.error_in(&COUNT, message));
            } else {
                self.workers = vec![None; count];
            }
        }
        self.idle = table.read(&IDLE)?;
        let below = table.read(&SLEEP_BELOW)?;
        match &mut self.idle {
            Idle::Sleep(load) => *load = below,
            _ if table.has(&SLEEP_BELOW) => {
                return Err(table.error_in(&SLEEP_BELOW, "the key needs idle = \"sleep\""));
            }
            _ => {}
        }
        Ok(())
    }

    fn read_pool(&mut self, table: &Settings<'_>) -> Result<(), ConfigError> {
        self.buffers = table.read(&BUFFERS)?;
        self.huge_pages = table.read(&HUGE_PAGES)?;
        self.shared = table.read(&SHARED)?;
        Ok(())
    }

    /// Rejects workers without a receive queue. `queues` is the number of all ports.
    pub fn check_queues(&self, queues: usize) -> Result<(), RuntimeError> {
        if self.workers.len() <= queues || self.workers_without_queues {
            return Ok(());
        }
        let position = self.core_spans.get(queues).cloned();
        Err(RuntimeError::IdleWorkers { workers: self.workers.len(), queues, position })
    }

    /// Rejects cores that the program may not use.
    pub fn check_cores(&self) -> Result<(), RuntimeError> {
        let Some(allowed) = core_affinity::get_core_ids() else { return Ok(()) };
        let allowed: Vec<usize> = allowed.into_iter().map(|core| core.id).collect();
        let usable = |core: &Option<usize>| core.is_none_or(|core| allowed.contains(&core));
        match self.workers.iter().position(|core| !usable(core)) {
            Some(index) => Err(RuntimeError::NoCore {
                core: self.workers[index].unwrap_or_default(),
                allowed,
                position: self.core_spans.get(index).cloned(),
            }),
            None => Ok(()),
        }
    }

    /// Returns the names of the ports in order, of tables with errors too. A missing name is empty.
    pub fn port_names(top: &Settings<'_>) -> Vec<String> {
        let tables = top.tables("port").unwrap_or_default();
        tables.iter().map(|table| table.get("name").ok().flatten().unwrap_or_default()).collect()
    }

    /// Reads the `[[port]]` tables from a configuration's top-level table, in order. Names and interfaces
    /// must be unique.
    pub fn ports_from_settings(top: &Settings<'_>) -> Result<Vec<PortSettings>, ConfigError> {
        let mut ports: Vec<PortSettings> = Vec::new();
        let tables = top.tables("port")?;
        if let Some(table) = tables.get(MAX_PORTS) {
            return Err(table.error(format!("{} ports, expected at most {MAX_PORTS}", tables.len())));
        }
        top.read_tables(&drivers::PORT, |table| {
            let device = table.span("device");
            let port = drivers::read_port(table)?;
            if let Some(other) = ports.iter().find(|other| other.name == port.name) {
                let message = format!("found \"{}\", which is the name of another port already", other.name);
                return Err(port.name_span.error(message));
            }
            if let Some(other) = ports.iter().find(|other| other.shares_interface(&port)) {
                let found = port.device.as_deref().unwrap_or_default();
                return Err(device.error(format!("found \"{found}\", which port \"{}\" already uses", other.name)));
            }
            ports.push(port);
            Ok(())
        })?;
        Ok(ports)
    }

    /// Describes the packet memory of a NUMA node.
    fn region(&self, node: Option<u32>) -> Result<RegionBuilder, PoolError> {
        let mut builder = RegionBuilder::new(Arena::bytes(self.buffers)?);
        if let Some(node) = node {
            builder = builder.numa_node(node);
        }
        if self.shared {
            builder = builder.shared();
        }
        match self.huge_pages {
            HugePages::Prefer => {}
            HugePages::Require => builder = builder.huge_pages(true),
            HugePages::Never => builder = builder.huge_pages(false),
        }
        Ok(builder)
    }

    /// Rejects packet memory that cannot be mapped on a NUMA node. Nothing stays mapped.
    pub(super) fn check_memory(&self, node: Option<u32>) -> Result<(), PoolError> {
        self.region(node)?.unpopulated().map()?;
        Ok(())
    }

    /// Maps the packet memory of a NUMA node.
    pub(super) fn arena(&self, node: Option<u32>) -> Result<Arena, PoolError> {
        let region = self.region(node)?.map()?;
        let backing = region.backing();
        let mib = region.bytes() >> 20;
        if self.huge_pages == HugePages::Prefer && backing != Backing::HugePages {
            tracing::info!("packet memory: {mib} MiB on {backing}, as no huge pages are free (vm.nr_hugepages)");
        } else {
            tracing::info!("packet memory: {mib} MiB on {backing}");
        }
        // Reserved huge pages do not count, and the kernel takes the others for use when they are written.
        if let Some((limit, file)) = memory_limit::least()
            && backing != Backing::HugePages
            && limit < region.bytes() as u64
        {
            tracing::warn!(
                "packet memory: {mib} MiB do not fit in the {} MiB of the program's control group ({}): the kernel \
                 ends the program when packets use them. Raise the limit (MemoryMax= of systemd.resource-control), or \
                 lower buffers in [pool]",
                limit >> 20,
                file.display()
            );
        }
        Ok(Arena::in_region(region))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wirepath_settings::Source;

    fn read(text: &str) -> Result<RuntimeConfig, String> {
        let source = Source::new("c.toml", text);
        let document = source.parse().map_err(|e| e.to_string())?;
        let settings = document.settings();
        let config = RuntimeConfig::from_settings(&settings).map_err(|e| e.to_string())?;
        settings.finish().map_err(|e| e.to_string())?;
        Ok(config)
    }

    #[test]
    fn reads_workers_and_pool() {
        let text =
            "[workers]\ncores = [1, 0]\nidle = 'busy'\n[pool]\nbuffers = 4096\nhuge_pages = 'never'\nshared = true\n";
        let config = read(text).unwrap();
        assert_eq!(config.workers, [Some(1), Some(0)]);
        assert_eq!((config.idle, config.buffers, config.huge_pages), (Idle::Busy, 4096, HugePages::Never));
        let sleep = |text: &str| read(&format!("[workers]\nidle = 'sleep'\n{text}")).unwrap().idle;
        assert_eq!((sleep(""), sleep("sleep_below = 7")), (Idle::Sleep(20_000), Idle::Sleep(7)));
        assert_eq!(read("[workers]\ncount = 3\n").unwrap().workers, [None; 3]);
        let default = read("").unwrap();
        assert_eq!((default.workers, default.buffers), (vec![None], 8192));
    }

    #[test]
    fn ports_have_names_of_their_own() {
        let text = "[[port]]\nname = 'a'\ndriver = 'null'\n[[port]]\nname = 'a'\ndriver = 'null'\n";
        let source = Source::new("c.toml", text);
        let document = source.parse().unwrap();
        let error = RuntimeConfig::ports_from_settings(&document.settings()).unwrap_err().to_string();
        assert_eq!(error, "c.toml:5:8: port[1].name: found \"a\", which is the name of another port already");
    }

    #[test]
    fn ports_have_interfaces_of_their_own() {
        let read = |second: &str| {
            let text = format!("[[port]]\nname = 'a'\ndevice = 'eth0'\n[[port]]\nname = 'b'\n{second}\n");
            let source = Source::new("c.toml", &text);
            let document = source.parse().unwrap();
            RuntimeConfig::ports_from_settings(&document.settings()).map(|ports| ports.len()).map_err(|e| e.to_string())
        };
        let error = read("driver = 'af_packet'\ndevice = 'eth0'").unwrap_err();
        assert_eq!(error, "c.toml:7:10: port[1].device: found \"eth0\", which port \"a\" already uses");
        assert_eq!(read("device = 'eth1'"), Ok(2));
        // The device of a memory cable or a generator is not an interface name.
        assert_eq!(read("driver = 'memory'\ndevice = 'eth0'"), Ok(2));
    }

    #[test]
    fn errors_name_the_cause() {
        let error = read("[workers]\ncores = [1, 1]\n").unwrap_err();
        assert_eq!(error, "c.toml:2:13: workers.cores[1]: core 1 is named twice; each worker needs a core of its own");
        let error = read("[workers]\ncores = [1]\ncount = 2\n").unwrap_err();
        let expected = "c.toml:3:9: workers.count: `cores` has one worker for each core already; keep one of both keys";
        assert_eq!(error, expected);
        assert!(read("[pool]\nbufers = 1\n").unwrap_err().contains("did you mean \"buffers\"?"));
        let error = read("[workers]\nsleep_below = 1\n").unwrap_err();
        assert!(error.ends_with("the key needs idle = \"sleep\""), "{error}");
        let error = read("[pool]\nbuffers = 1\n").unwrap_err();
        assert!(error.ends_with("found 1, expected an integer from 64 to 16777215"), "{error}");
    }
}
