// Search runs in a Web Worker, which browsers refuse to pages that are opened from disk. There, a hidden frame of the
// page's own origin stands in for it: the worker's script runs in the frame, and messages are handed over as events.
// The theme's plugin "offline" would load such a script from the network, unless one of this name is given.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.receive(new MessageEvent("message", { data }));
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.ready = this.load(new URL(url, document.baseURI).href);
    }

    load(src) {
      return new Promise((onload, onerror) => {
        const script = Object.assign(this.frame.contentDocument.createElement("script"), { src, onload, onerror });
        this.frame.contentDocument.body.appendChild(script);
      });
    }

    receive(event) {
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      const { contentWindow } = this.frame;
      this.ready.then(() => contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
