//! A simulated gateway with a control socket and an address for metrics, for the targets that are their clients.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use wirepath::control_socket::{ControlSettings, ControlSocket, MayChange};
use wirepath::packet::{Batch, Pool, PortId};
use wirepath::pipeline::epoch::Domain;
use wirepath::pipeline::registry::Management;
use wirepath::pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath::pipeline::{Control, PortInfo, SteppedRuntime, WorkerInfo};
use wirepath::settings::Source;

const CONFIG: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
    [[segment]]\nname = 'red'\nvni = 42\nremotes = ['10.9.0.2', 'fd00:9::2']\nports = [{ port = 'lan' }]\n\
    addresses = ['10.1.0.1/24']\nstatic = [{ mac = '02:00:00:00:00:07', remote = '10.9.0.2' }]\n\
    [[segment]]\nkind = 'geneve'\nvni = 43\nremotes = ['10.9.0.3']\nports = [{ port = 'lan', vlan = 8 }]\n\
    [[vrf]]\nname = 'default'\nroutes = [{ to = '10.2.0.0/16', discard = 'prohibit' }]\n";

/// The gateway. Its thread serves the socket when [`Self::serve`] is called.
pub struct Program {
    stepped: SteppedRuntime<Gateway>,
    control: GatewayControl,
    socket: ControlSocket,
    path: PathBuf,
}

impl Program {
    pub fn new(metrics: bool) -> Self {
        let source = Source::new("fuzz", CONFIG);
        let document = source.parse().expect("TOML");
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).expect("a configuration");
        let pool = Pool::new("fuzz", 64).expect("memory");
        let us = "02:00:00:00:00:01".parse().ok();
        let ports = vec![
            PortInfo::simulated(PortId::new(0), "wan", us, 1500, &pool),
            PortInfo::simulated(PortId::new(1), "lan", None, 1500, &pool),
        ];
        let domain = Domain::new();
        let mut control = GatewayControl::new(&config, &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let mut stepped = SteppedRuntime::new(ports, &domain, control.stage(&worker)).expect("eventfds");
        stepped.with_plane(|plane| control.tick(plane));
        let path = std::env::temp_dir().join(format!("wirepath-fuzz-{}.sock", std::process::id()));
        let settings = ControlSettings {
            socket: Some(path.clone()),
            change: MayChange::All,
            metrics: metrics.then(|| "127.0.0.1:0".parse().expect("an address")),
            ..ControlSettings::default()
        };
        let socket = ControlSocket::open(&settings, "fuzz", None).expect("a socket").expect("not off");
        Self { stepped, control, socket, path }
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).expect("the program listens");
        stream.set_nonblocking(true).expect("a socket");
        stream
    }

    /// Serves clients for one turn.
    pub fn serve(&mut self) {
        let Self { stepped, control, socket, .. } = self;
        stepped.with_plane(|plane| socket.serve(control, plane));
        // The worker notices captures that have ended.
        stepped.process(None, &mut Batch::new());
    }
}
