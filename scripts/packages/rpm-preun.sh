if [ "$1" -eq 0 ] && [ -d /run/systemd/system ]; then
    systemctl disable --now tunnel-gateway.service
    systemctl stop 'l2fwd@*.service'
fi
exit 0
