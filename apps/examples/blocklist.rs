//! An application that operators look into and change while it runs: it returns UDP datagrams to their senders, except
//! those to blocked ports.
//!
//! It adds a drop reason, a counter and commands of its own. They need no code for displays:
//!
//!     cargo run --release --example blocklist &       # on generated traffic; --config FILE: on ports of a file
//!     wirepath command                                # lists the commands
//!     wirepath command block port=9
//!     wirepath show counters
//!     wirepath show drops --where reason=blocked_port
//!     wirepath capture --drops=blocked_port -w - | tshark -r -

use std::collections::BTreeSet;
use std::sync::Arc;

use wirepath::pipeline::Summary;
use wirepath::prelude::*;

const GENERATED: &str = "[[port]]\nname = 'generator'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\nflows = 100\n";

const PORT: Argument = Argument::required("port", ArgumentKind::Number, "UDP destination port");
static COMMANDS: [&CommandSpec; 3] = [
    &CommandSpec { name: "block", about: "Drops datagrams to a port", arguments: &[PORT] },
    &CommandSpec { name: "unblock", about: "Returns datagrams to a port again", arguments: &[PORT] },
    &CommandSpec { name: "blocked", about: "Lists the blocked ports", arguments: &[] },
];

/// Blocked ports. The control thread replaces the set as a whole; workers read it without locks.
struct Blocklist {
    ports: BTreeSet<u16>,
    shared: Arc<Shared<BTreeSet<u16>>>,
}

impl Control for Blocklist {
    fn commands(&mut self) -> Vec<&'static CommandSpec> {
        COMMANDS.to_vec()
    }

    fn command(&mut self, command: &Command<'_>, _: &mut ControlPlane) -> Result<Value, String> {
        let port = || {
            let number = command.number("port")?.unwrap_or_default();
            u16::try_from(number).map_err(|_| format!("port: found {number}, expected at most 65535"))
        };
        let changed = match command.name {
            "block" => self.ports.insert(port()?),
            "unblock" => self.ports.remove(&port()?),
            "blocked" => return Ok(json!({ "ports": self.ports })),
            _ => return Err(command.unknown()),
        };
        self.shared.replace(self.ports.clone());
        Ok(json!({ "changed": changed, "ports": self.ports }))
    }
}

/// Runs the application on the ports of its configuration.
pub(crate) fn run(app: App) -> Result<Option<Summary>, Failure> {
    app.run(|runtime, ()| {
        let blocked = DropReason::register("blocked_port", "the destination port is blocked")?;
        let about = "Datagrams returned to their senders";
        let returned = CounterId::register("datagrams_returned", Unit::Packets, about)?;
        let shared = runtime.share(BTreeSet::new());
        let control = Blocklist { ports: BTreeSet::new(), shared: Arc::clone(&shared) };
        let make = move |_: &WorkerInfo| {
            let shared = Arc::clone(&shared);
            move |context: &mut Context<'_>, batch: &mut Batch| {
                let ports = shared.read(context.guard());
                context.parse_each(batch, |context, mut packet, headers| {
                    let layers = headers.outer();
                    let udp = layers.udp(packet.data()).filter(|_| layers.l4_type() == L4Type::Udp);
                    let Some(udp) = udp else {
                        context.drop(packet, DropReason::RuleDrop);
                        return None;
                    };
                    if ports.contains(&udp.dst_port()) {
                        context.drop(packet, blocked);
                        return None;
                    }
                    context.count(returned, 1);
                    packet.set_out_port(packet.in_port());
                    Some(packet)
                });
            }
        };
        Ok((make, control))
    })
}

fn main() -> ExitCode {
    wirepath::main(|| {
        let about = "Returns UDP datagrams to their senders, except those to blocked ports.";
        run(App::from_args("blocklist", about, GENERATED)?)
    })
}
